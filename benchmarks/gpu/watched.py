"""Runs the Triton kernels over ragged, empty and full batches and compares each with its reference.

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
from machines import device_for  # noqa: E402

from faser.engine_adapter.pruning import prefix_kernel  # noqa: E402
from faser.engine_adapter.pruning.prefixes import DraftLayout, StayingRows, staying_rows  # noqa: E402

SIZE: Final = part_kernel.Size(512, 1024, 8)  # two blocks of the hidden size
ROUNDING: Final = 1e-4


def main() -> None:
    """Run what is asked for and write what agreed."""
    is_dry = "--dry-run" in sys.argv
    torch.set_grad_enabled(False)
    device = device_for(is_dry)
    found = {"_plan": [_reads_behind_the_end(device)]} if "--short" in sys.argv else _everything(device, is_dry)
    if not is_dry:
        torch.cuda.synchronize()
    told = {kernel: {"runs": len(agreed), "agreed": sum(agreed)} for kernel, agreed in found.items()}
    Path(sys.argv[1]).write_text(json.dumps(told))


def _everything(device: torch.device, is_dry: bool) -> dict[str, list[bool]]:
    """Return of each kernel which runs agreed; those of bfloat16, which rounds otherwise, only have to end."""
    apart = part_decoder.measure(is_dry)
    found = {
        "_add_norm": [max(apart["add_norm"], apart["residual"]) < ROUNDING], "_gate": [apart["gate"] < ROUNDING],
        "_rope_store": [max(apart[name] for name in ("queries", "keys", "values")) < ROUNDING],
    }  # fmt: skip
    draw = np.random.default_rng(7)
    batches = _batches(is_dry, draw)
    found["_plan"] = [same for drafts in batches for same in _plans(device, np.array(drafts), draw)]
    size = part_kernel.TINY if is_dry else SIZE
    cases = [
        part_kernel.Case(device, size, drafts, dtype, seed) for seed, drafts in enumerate(batches)
        for dtype in ((torch.float32,) if is_dry else (torch.float32, torch.bfloat16))
    ]  # fmt: skip
    found["_score"] = [_scores_alike(case) for case in cases]
    # The last: where its barriers are taken out, it alone may write to a wrong address and end the program.
    found["_decide"] = [_decides_alike(case) for case in cases]
    return found


def _batches(is_dry: bool, draw: np.random.Generator) -> list[list[int]]:
    """Return draft lengths by request: one alone, ragged ones with empty ones among them, one of several blocks."""
    if is_dry:
        return [[2], [1, 0, 3]]
    ragged = [draw.integers(0, 8, requests).tolist() for requests in (5, 32, 60)]
    return [[3], *([1, *lengths] for lengths in ragged), [7] * 160]


def _plans(device: torch.device, drafts: Any, draw: np.random.Generator) -> list[bool]:
    layout = _layout(device, drafts, drafts + 1 + draw.integers(0, 3, len(drafts)))
    chances = torch.from_numpy(draw.random(layout.drafts, np.float32)).to(device)
    return [
        _are_equal(prefix_kernel.staying_rows(chances, 0.5, layout, budget), staying_rows(chances, 0.5, layout, budget))
        for budget in sorted({0, layout.drafts // 2, layout.drafts})
    ]


def _scores_alike(case: part_kernel.Case) -> bool:
    found = prefix_kernel.chances(case.head, case.lm_head, case.checks)
    expected = case.heads.accepts(part_kernel.LAYER, case.checks).float()
    return case.is_rounded or bool(torch.isclose(found, expected, atol=ROUNDING).all())


def _decides_alike(case: part_kernel.Case) -> bool:
    threshold = case.threshold(0.3)
    same = case.by_kernel(threshold).kept == case.by_reference(threshold).kept
    return case.is_rounded or bool(same.all())


def _layout(device: torch.device, drafts: Any, lengths: Any) -> DraftLayout:
    return DraftLayout.of(drafts, lengths, lambda flat: torch.from_numpy(flat).to(device))


def _are_equal(one: StayingRows, other: StayingRows) -> bool:
    names = (each.name for each in dataclasses.fields(StayingRows))
    return all(bool((getattr(one, name) == getattr(other, name)).all()) for name in names)


def _reads_behind_the_end(device: torch.device) -> bool:
    drafts = np.array([4, 4])
    layout = _layout(device, drafts, drafts + 1)
    prefix_kernel.staying_rows(torch.full((7,), 0.5, device=device), 0.5, layout, 4)  # of eight chances
    return True


if __name__ == "__main__":
    main()
