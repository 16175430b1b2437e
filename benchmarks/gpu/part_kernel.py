"""The exit heads' Triton kernel against the reference in torch and numpy: do they agree, and what does each take."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from machines import Machine, machine_for, told

from faser.engine_adapter.pruning import exit_kernel
from faser.engine_adapter.pruning.cut import Cut, CutBatch
from faser.engine_adapter.pruning.exit_heads import FEATURES, ExitHeads
from faser.engine_adapter.pruning.head_math import Head
from faser.engine_adapter.pruning.verdict import TokenHeads, Verdict

LAYER = 0
RANK = 16


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a case."""

    hidden: int
    vocabulary: int
    candidates: int


SIZE = Size(4096, 151936, 8)
TINY = Size(40, 96, 3)


class Case:
    """Made-up heads and a made-up step of theirs, on the machine's device."""

    def __init__(self, device: torch.device, size: Size, drafts: list[int], dtype: torch.dtype, seed: int) -> None:
        self.is_rounded = dtype != torch.float32  # then kernel and reference round differently
        draw = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device=device).to(dtype)

        tokens, hidden = sum(drafts), size.hidden
        self.head = Head(
            1.0 + 0.1 * normal(hidden), normal(RANK, hidden) / hidden, normal(hidden, RANK), normal(hidden) / 5,
            normal(hidden) / hidden, (normal(len(FEATURES) + 1) / 3).float(),
        )  # fmt: skip
        self.lm_head = normal(size.vocabulary, hidden) / hidden**0.5
        ids = torch.randint(size.vocabulary, (tokens, size.candidates), generator=draw, device=device)
        drawn = torch.randint(size.vocabulary, (tokens,), generator=draw, device=device)
        own = torch.rand(tokens, generator=draw, device=device) < 0.6
        ids[:, 0] = torch.where(own, drawn, ids[:, 0])  # mostly the drafter's likeliest is what it drew
        positions = torch.cat([torch.arange(1, count + 1) for count in drafts]).to(device)
        confidences = torch.rand(tokens, generator=draw, device=device)
        self.checks: Any = SimpleNamespace(
            states=normal(tokens, hidden), tokens=drawn.int(), candidates=ids, confidences=confidences,
            positions=positions,
        )  # fmt: skip
        self.batch = CutBatch(np.array(drafts), np.array(drafts) + 1, np.zeros(tokens, np.bool_))
        self.heads = ExitHeads({LAYER: self.head}, self.lm_head, size.candidates)

    def threshold(self, share: float) -> float:
        """Return a threshold that about `share` of the tokens miss, in a gap that rounding does not bridge."""
        accepts = np.sort(self.heads.accepts(LAYER, self.checks).cpu().numpy().astype(np.float64))
        edges = np.concatenate([[-1.0], accepts, [2.0]])
        gaps = np.flatnonzero(np.diff(edges) > 1e-4)
        at = gaps[int(share * (len(gaps) - 1))]
        return float(edges[at] + edges[at + 1]) / 2

    def by_kernel(self, threshold: float) -> Verdict:
        return exit_kernel.decide(self.head, self.lm_head, threshold, self.checks, self.batch)

    def by_reference(self, threshold: float) -> Verdict:
        return TokenHeads.decide(self.heads, LAYER, threshold, self.checks, self.batch)


def measure(is_dry: bool) -> dict[str, Any]:
    """Return agreement over random steps and times per batch size."""
    machine, requests, length, rounds = machine_for(is_dry), (1, 2) if is_dry else (1, 8, 32, 64), 4, 45
    if is_dry:
        length, rounds = 2, 2
    size = TINY if machine.is_dry else SIZE
    torch.backends.cuda.matmul.allow_tf32 = False
    agreement = {"float32": _agreement(machine, size, torch.float32, 3 if machine.is_dry else 60)}
    if not machine.is_dry:
        agreement["bfloat16"] = _agreement(machine, size, torch.bfloat16, 60)
    times = {}
    for count in requests:
        case = Case(machine.device, size, [length] * count, machine.dtype, count)
        threshold = case.threshold(0.3)
        arms = {
            "kernel": partial(case.by_kernel, threshold), "reference": partial(case.by_reference, threshold),
        }  # fmt: skip
        found = machine.rounds(arms, rounds)
        ratios = [one / other for one, other in zip(found["reference"], found["kernel"], strict=True)]
        times[str(count)] = {name: told(found[name]) for name in arms} | {"reference_by_kernel": told(ratios)}
    return {"size": [size.hidden, size.vocabulary, size.candidates], "agreement": agreement, "times_ms": times}


def _agreement(machine: Machine, size: Size, dtype: torch.dtype, steps: int) -> dict[str, int]:
    """Compare whole decisions; in bfloat16 the two round differently, so requests are counted as well as steps."""
    draw = np.random.default_rng(1)
    equal = requests = equal_requests = 0
    for seed in range(steps):
        drafts = draw.integers(0, 7, int(draw.integers(1, 5 if machine.is_dry else 65))).tolist()
        drafts[0] = max(drafts[0], 1)
        case = Case(machine.device, size, drafts, dtype, seed)
        threshold = case.threshold(float(draw.random()))
        one, other = case.by_kernel(threshold), case.by_reference(threshold)
        same = one.kept == other.kept
        equal += bool(same.all()) and one.rows.tolist() == Cut(case.batch, other.kept).rows.tolist()
        requests += len(drafts)
        equal_requests += int(same.sum())
    return {"steps": steps, "equal": equal, "requests": requests, "equal_requests": equal_requests}
