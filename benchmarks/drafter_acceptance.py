"""Acceptance of a drafter in vLLM on held-out prompts: `python benchmarks/drafter_acceptance.py [--json]`.

Runs vLLM itself, without the sidecar, at one fixed draft length: which share of drafts was accepted up to each position
and how many tokens a step gave, greedy and at T = 0.7, over all prompts and for each kind. Only prompts of the held-out
side of env/workload/held_out.py are used. vLLM 0.32's sampling at T > 0 is mended first
(engine_adapter/patches/v1.py). Acceptance depends on weights, prompts and sampling noise, not on load or machine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embedded_engine import chat, start_engine

from faser.env.workload.prompts import KINDS, held_out_prompts


@dataclass(frozen=True, slots=True)
class Counts:
    """What vLLM counted while it answered some prompts."""

    drafts: int
    accepted: tuple[int, ...]

    def minus(self, earlier: Counts) -> Counts:
        pairs = zip(self.accepted, earlier.accepted, strict=True)
        return Counts(self.drafts - earlier.drafts, tuple(now - before for now, before in pairs))

    def plus(self, other: Counts) -> Counts:
        pairs = zip(self.accepted, other.accepted, strict=True)
        return Counts(self.drafts + other.drafts, tuple(one + two for one, two in pairs))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `mean_length` counts the target's own token."""

    kind: str
    temperature: float
    prompts: int
    drafts: int
    acceptance_by_position: tuple[float, ...]
    mean_length: float


def row(kind: str, temperature: float, prompts: int, counts: Counts) -> Row:
    rates = tuple(count / max(1, counts.drafts) for count in counts.accepted)
    return Row(kind, temperature, prompts, counts.drafts, tuple(round(r, 4) for r in rates), round(1 + sum(rates), 4))


def start_mended_engine(target: Path | None, drafter: Path | None, k: int, seed: int) -> Any:
    """Return vLLM without FASER, its sampling mended."""
    engine = start_engine(
        k, 16, target, drafter, {}, max_model_len=2048, enable_prefix_caching=False, disable_log_stats=False, seed=seed
    )
    from faser.engine_adapter.patches.v1 import mend_expand

    mend_expand()  # vLLM puts its CPU kernels in place only when a worker starts
    return engine


def read_counts(engine: Any, k: int) -> Counts:
    drafts, accepted = 0, (0,) * k
    for metric in engine.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts = int(metric.value)
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = tuple(metric.values)
    return Counts(drafts, accepted)


def answer(engine: Any, texts: Sequence[str], temperature: float, max_tokens: int, k: int) -> Counts:
    before = read_counts(engine, k)
    chat(engine, texts, temperature=temperature, max_tokens=max_tokens)
    return read_counts(engine, k).minus(before)


def measure(engine: Any, temperature: float, texts: dict[str, list[str]], max_tokens: int, k: int) -> list[Row]:
    rows = []
    total = Counts(0, (0,) * k)
    for kind, chosen in texts.items():
        counts = answer(engine, chosen, temperature, max_tokens, k)
        rows.append(row(kind, temperature, len(chosen), counts))
        total = total.plus(counts)
    return [*rows, row("all", temperature, sum(map(len, texts.values())), total)]


def chosen_texts(per_kind: int, seed: int, longest_tokens: int, file: Path | None) -> dict[str, list[str]]:
    """Pick held-out prompts of each kind, or take the lines of a file."""
    if file:
        return {file.stem: [line for line in file.read_text().splitlines() if line.strip()]}
    draw = random.Random(seed)
    texts = {}
    for kind in KINDS:
        prompts = [prompt.text for prompt in held_out_prompts([kind]) if prompt.tokens <= longest_tokens]
        texts[kind] = draw.sample(prompts, min(per_kind, len(prompts)))
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="folder; default: the embedded target")
    parser.add_argument("--drafter", type=Path, help="folder; default: the embedded drafter")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each kind")
    parser.add_argument("--file", type=Path, help="prompts of your own, one a line")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--longest-prompt", type=int, default=900, help="tokens")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    texts = chosen_texts(given.prompts, given.seed, given.longest_prompt, given.file)
    engine = start_mended_engine(given.target, given.drafter, given.k, given.seed)
    rows = [line for heat in (0.0, 0.7) for line in measure(engine, heat, texts, given.max_tokens, given.k)]
    if given.json:
        print(json.dumps([asdict(line) for line in rows], indent=1))
        return
    print(f"{'kind':14} {'T':>4} {'prompts':>7} {'drafts':>7} {'tokens/step':>11}  accepted by position")
    for line in rows:
        rates = " ".join(f"{rate:.3f}" for rate in line.acceptance_by_position)
        print(
            f"{line.kind:14} {line.temperature:4g} {line.prompts:7} {line.drafts:7} {line.mean_length:11.3f}  {rates}"
        )


if __name__ == "__main__":
    main()
