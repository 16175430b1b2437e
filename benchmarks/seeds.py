"""What a draw by seed costs beside vLLM's own draw for a request with a seed, on one core, in microseconds.

`python benchmarks/seeds.py`: rows of logits spread as a language model's (standard deviation 3), at the vocabulary of
the embedded target and of Llama 3, unfiltered and under top-k 50; the median of the rows, the best of the turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from faser.engine_adapter.sampling.noise import draw, stream_keys

VOCABULARIES = (49_152, 128_256)
ROWS, TURNS = 60, 7


def microseconds(work: Callable[[int], object]) -> float:
    """Return what one row takes."""
    turns = []
    for _ in range(TURNS):
        spent = []
        for row in range(ROWS):
            begun_s = time.perf_counter()
            work(row)
            spent.append(time.perf_counter() - begun_s)
        turns.append(median(spent))
    return min(turns) * 1e6


def main() -> None:
    """Print a table."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    current_platform.import_kernels()
    torch.set_num_threads(1)
    sampler, generator = TopKTopPSampler(), torch.Generator().manual_seed(1)
    print("vocabulary  filter    by seed  vLLM's, CPU  vLLM's, elsewhere (run on the CPU)")
    for vocabulary in VOCABULARIES:
        logits = torch.randn((ROWS, vocabulary), generator=generator) * 3
        for name in ("none", "top-k 50"):
            if name != "none":
                logits[logits < logits.topk(50).values[:, -1:]] = -torch.inf
            keys = stream_keys(torch.arange(ROWS), torch.arange(ROWS))
            mine = microseconds(
                lambda row, given=(logits, keys): draw(given[0][row : row + 1], given[1][row : row + 1])
            )
            theirs = [
                microseconds(lambda row, how=how, given=logits: how(given[row : row + 1], {0: generator}, None, None))
                for how in (sampler.forward_cpu, sampler.forward_native)
            ]
            print(f"{vocabulary:10,}  {name:8} {mine:8.0f}  {theirs[0]:11.0f}  {theirs[1]:18.0f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
