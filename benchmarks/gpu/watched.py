"""Runs every Triton kernel over ragged, empty and full batches and compares each with its reference.

This is what the sanitizer watches (part_sanitizer.py): `watched.py OUTPUT`, a JSON file of how many runs of each kernel
agreed. `--short` reads one number behind the end of an array on purpose, which the sanitizer must see.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Final

import checkout
import numpy as np
import torch

checkout.make_importable()

import part_decoder  # noqa: E402 - the package must be importable first
import part_kernel  # noqa: E402
from machines import Machine, machine_for  # noqa: E402

from faser.engine_adapter.pruning import prefix_kernel  # noqa: E402
from faser.engine_adapter.pruning.prefixes import DraftLayout, StayingRows, staying_rows  # noqa: E402

SIZE: Final = part_kernel.Size(512, 1024, 8)  # two blocks of the hidden size
ROUNDING: Final = 1e-4


def main() -> None:
    """Run what is asked for and write what agreed."""
    is_dry = "--dry-run" in sys.argv
    torch.set_grad_enabled(False)
    machine = machine_for(is_dry)
    found = {"_plan": [_reads_behind_the_end(machine)]} if "--short" in sys.argv else _everything(machine)
    machine.wait()
    told = {kernel: {"runs": len(agreed), "agreed": sum(agreed)} for kernel, agreed in found.items()}
    Path(sys.argv[1]).write_text(json.dumps(told))


def _everything(machine: Machine) -> dict[str, list[bool]]:
    """Return of each kernel which runs agreed; those of bfloat16, which rounds otherwise, only have to end."""
    apart = part_decoder.measure(machine.is_dry)
    found = {
        "_add_norm": [max(apart["add_norm"], apart["residual"]) < ROUNDING], "_gate": [apart["gate"] < ROUNDING],
        "_rope_store": [max(apart[name] for name in ("queries", "keys", "values")) < ROUNDING],
    }  # fmt: skip
    draw = np.random.default_rng(7)
    for seed, drafts in enumerate(_batches(machine, draw)):
        _plans(found.setdefault("_plan", []), machine, np.array(drafts), draw)
        for dtype in (torch.float32,) if machine.is_dry else (torch.float32, torch.bfloat16):
            size = part_kernel.TINY if machine.is_dry else SIZE
            case = part_kernel.Case(machine, size, drafts, dtype, seed)
            is_rounded = dtype != torch.float32
            close = torch.isclose(
                prefix_kernel.chances(case.head, case.lm_head, case.checks),
                case.heads.accepts(part_kernel.LAYER, case.checks).float(), atol=ROUNDING,
            )  # fmt: skip
            found.setdefault("_score", []).append(is_rounded or bool(close.all()))
            threshold = case.threshold(0.3)
            same = case.by_kernel(threshold).kept == case.by_reference(threshold).kept
            found.setdefault("_decide", []).append(is_rounded or bool(same.all()))
    return found


def _batches(machine: Machine, draw: np.random.Generator) -> list[list[int]]:
    """Return draft lengths by request: one alone, ragged ones with empty ones among them, a full one."""
    if machine.is_dry:
        return [[2], [1, 0, 3]]
    ragged = [draw.integers(0, 8, requests).tolist() for requests in (5, 32, 60)]
    return [[3], *([1, *lengths] for lengths in ragged), [7] * 64]


def _plans(agreed: list[bool], machine: Machine, drafts: Any, draw: np.random.Generator) -> None:
    layout = _layout(machine, drafts, drafts + 1 + draw.integers(0, 3, len(drafts)))
    chances = torch.from_numpy(draw.random(layout.drafts, np.float32)).to(machine.device)
    for budget in {0, layout.drafts // 2, layout.drafts}:
        one = prefix_kernel.staying_rows(chances, 0.5, layout, budget)
        agreed.append(_are_equal(one, staying_rows(chances, 0.5, layout, budget)))


def _layout(machine: Machine, drafts: Any, lengths: Any) -> DraftLayout:
    return DraftLayout.of(drafts, lengths, lambda flat: torch.from_numpy(flat).to(machine.device))


def _are_equal(one: StayingRows, other: StayingRows) -> bool:
    names = (each.name for each in dataclasses.fields(StayingRows))
    return all(bool((getattr(one, name) == getattr(other, name)).all()) for name in names)


def _reads_behind_the_end(machine: Machine) -> bool:
    drafts = np.array([4, 4])
    layout = _layout(machine, drafts, drafts + 1)
    prefix_kernel.staying_rows(torch.full((7,), 0.5, device=machine.device), 0.5, layout, 4)  # of eight chances
    return True


if __name__ == "__main__":
    main()
