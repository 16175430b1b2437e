"""What a draw by seed costs beside vLLM's own draw, on one core: a row, and the sampler's part of a step with drafts.

`python benchmarks/seeds.py`: rows of logits spread as a language model's (standard deviation 3), at the vocabulary of
the embedded target and of Llama 3, unfiltered and under top-k 50; the median of the rows, the best of the turns, in
microseconds. Then a step of sixteen requests without seeds, with none to sixteen drafts: vLLM's samplers alone, and
with FASER's draws in their place; the median of the turns, in milliseconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from faser.engine_adapter.hook_guard import HookGuard
from faser.engine_adapter.patches.sampling import drawn_by
from faser.engine_adapter.sampling.noise import draw, stream_keys
from faser.engine_adapter.sampling.seeded_step import SeededStep, Stream

VOCABULARIES = (49_152, 128_256)
ROWS, TURNS = 60, 7
REQUESTS, DRAFTS, STEPS = 16, (0, 1, 4, 16), 25


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


def metadata_of(temperature: float) -> Any:
    """Return vLLM's sampling metadata of requests that all draw at random, without seeds and filters."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    none = torch.zeros(REQUESTS)
    return SamplingMetadata(
        temperature=none + temperature, all_greedy=False, all_random=True, top_p=None, top_k=None, generators={},
        max_num_logprobs=None, no_penalties=True, prompt_token_ids=None, frequency_penalties=none,
        presence_penalties=none, repetition_penalties=none + 1, output_token_ids=[[] for _ in range(REQUESTS)],
        allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip


def verified(drafts: int) -> tuple[Any, list[int]]:
    """Return vLLM's metadata of a step in which the first `drafts` requests have one draft, and the drafts of each."""
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    counts = [int(row < drafts) for row in range(REQUESTS)]
    ends = torch.tensor(counts).add(1).cumsum(0)
    rows = torch.arange(int(ends[-1]))
    return SpecDecodeMetadata(
        draft_token_ids=torch.zeros(drafts, dtype=torch.int32), num_draft_tokens=counts,
        cu_num_draft_tokens=torch.tensor(counts).cumsum(0).int(), cu_num_sampled_tokens=ends.int(),
        bonus_logits_indices=ends - 1, target_logits_indices=rows[~torch.isin(rows, ends - 1)], logits_indices=rows,
    ), counts  # fmt: skip


def step_ms(vocabulary: int, drafts: int, is_ours: bool) -> float:
    """Return what vLLM's samplers take in a step, or FASER's draws in their place."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    plain, sampling = Sampler(), metadata_of(0.7)
    checker = RejectionSampler(plain)
    runner = SimpleNamespace(sampler=plain, rejection_sampler=checker)
    verification, counts = verified(drafts)
    logits = torch.randn((REQUESTS + drafts, vocabulary), generator=torch.Generator().manual_seed(2)) * 3
    streams, firsts = [Stream(row, row) for row in range(REQUESTS)], torch.arange(REQUESTS)
    guard, spent = HookGuard("benchmark", logging.getLogger("benchmark")), []

    def sample(given: Any) -> None:
        if drafts:
            checker(verification, None, given, sampling)
        else:
            plain(logits=given, sampling_metadata=sampling)

    for _ in range(STEPS):
        given, begun_s = logits.clone(), time.perf_counter()
        if is_ours and drafts:  # without drafts the draws stay vLLM's
            with drawn_by(runner, SeededStep(streams, firsts, counts, guard, draws_all=True)):
                sample(given)
        else:
            sample(given)
        spent.append(time.perf_counter() - begun_s)
    assert not guard.faults
    return median(spent) * 1e3


def print_steps() -> None:
    """Print the table of steps."""
    print(f"\n{REQUESTS} requests, drafts  vLLM's  FASER's, ms")
    for vocabulary in VOCABULARIES:
        for drafts in DRAFTS:
            theirs, mine = (step_ms(vocabulary, drafts, is_ours) for is_ours in (False, True))
            print(f"{vocabulary:10,}  {drafts:10}  {theirs:6.1f}  {mine:11.1f}")


def main() -> None:
    """Print two tables."""
    from vllm.platforms import current_platform
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from faser.engine_adapter.patches.v1 import mend_expand

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    mend_expand()
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
    print_steps()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
