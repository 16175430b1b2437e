"""What `faser calibrate` prints: tables of errors, acceptance and exit heads, and the figures of --json.

Called by controller/calibrate/calibrate.py; nothing here fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from rich.table import Table

from ...engine_adapter.arrays import Floats
from ...env.calibration.acceptance_fit import Description, DraftTrial, describe
from ...env.calibration.exit_fit import PruneObservation
from ...env.calibration.step_fit import COUNTED_REPEATS, Fit
from ...env.profile.engine_profile import Ahead, EngineProfile, Exit, Split
from ...env.profile.match_model import MatchModel
from ...env.profile.step_basis import Phase

BAR_MEDIAN: Final = 0.05
BAR_P90: Final = 0.12


def error_table(fits: dict[Phase, Fit]) -> Table:
    """Return the held-out errors beside the engine's own spread."""
    table = Table(title="predicted against measured, cells never fitted")
    for name in ("phase", "cells", "held out", "median error", "p90", "engine's spread", "single step"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase, fit in fits.items():
        model, cells = fit.model, fit.cells
        table.add_row(
            phase, str(len(cells)), str(model.held_out_cells), _percent(model.held_out_median),
            _percent(model.held_out_p90), _percent(fit.spread()), _percent(float(np.median(cells.step_spread))),
        )  # fmt: skip
    table.caption = (
        f"bars: median {BAR_MEDIAN:.0%}, p90 {BAR_P90:.0%}; held out: cells of {COUNTED_REPEATS} repeats or more, for "
        "draft with something drafted; spread: by how much a cell's median is off, from its earlier and later repeats; "
        "single step: one step around its median"
    )
    return table


def acceptance_table(description: Description) -> Table:
    """Return how well the generator describes the drafts."""
    table = Table(title="acceptance given that the token before was accepted")
    for name in ("position", "tested", "measured", "model", "AUC measured", "AUC model"):
        table.add_column(name, justify="right")
    for position, tested in enumerate(description.trials):
        table.add_row(
            str(position + 1), str(tested), *(
                f"{values[position]:.3f}" for values in (
                    description.measured_means, description.model_means, description.measured_auc, description.model_auc
                )
            ),
        )  # fmt: skip
    table.caption = (
        f"requests differ by {description.measured_request_spread:.3f} beyond chance, "
        f"in the model by {description.model_request_spread:.3f}"
    )
    return table


def exit_table(exits: tuple[Exit, ...], seen: list[PruneObservation]) -> Table:
    """Return what exit heads found, what they spared and what looking took."""
    table = Table(title="exit heads")
    for name in ("layer", "steps", "layers spared", "rejections found", "accepted, cut", "a look", "and per token"):
        table.add_column(name, justify="right")
    for each in exits:
        table.add_row(
            str(each.layer), str(sum(look.layer == each.layer for look in seen)), _percent(each.saved_share),
            _percent(each.recall), _percent(each.false_alarm), f"{1e3 * each.look_s:.2f} ms",
            f"{1e6 * each.look_token_s:.1f} us",
        )  # fmt: skip
    return table


def ahead_line(ahead: Ahead, steps: int) -> str:
    """Return what drafting ahead came to."""
    return (
        f"drafting ahead, {steps} steps: there behind {_percent(ahead.ready)} of the drafts that were accepted as a "
        f"whole, {_percent(ahead.hidden)} of their time hidden, accepted {ahead.acceptance:.2f} times as often, "
        f"verification beside it {ahead.verify_factor:.3f} times as long"
    )


def split_table(splits: Sequence[Split]) -> Table:
    """Return what each split does to both phases."""
    table = Table(title="splits, drafter to target: a group's steps over the same work on the whole device")
    for name in ("split", "verifying", "drafting", "hidden"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for split in splits:
        factors = (f"{split.verify_factor:.3f}", f"{split.draft_factor:.3f}", _percent(split.overlap))
        table.add_row(split.name, *factors)
    table.caption = "verifying and drafting: times as long; hidden: of the shorter of both, while two groups take turns"
    return table


def match_line(matches: MatchModel) -> str:
    """Return what copied drafts came to."""
    whole, other = (_percent(1.0 / (1.0 + math.exp(-after))) for after in (matches.after_whole, matches.after_other))
    means = ", ".join(map(_percent, matches.tokens.means))
    return (
        f"{matches.copies} copied drafts: a usual request has one behind {whole} of the steps that accepted one as a "
        f"whole and behind {other} of the others, spread {matches.spread:.2f} on the logit scale; accepted by "
        f"position {means}"
    )


def figures(fits: dict[Phase, Fit], profile: EngineProfile, drafts: list[DraftTrial]) -> dict[str, object]:
    """Return what --json prints."""
    found: dict[str, object] = {
        phase: {
            "cells": len(fit.cells),
            "held_out_cells": fit.model.held_out_cells,
            "held_out_median": fit.model.held_out_median,
            "held_out_p90": fit.model.held_out_p90,
            "repeat_spread": _or_none(fit.spread()),
            "step_spread": float(np.median(fit.cells.step_spread)),
        }
        for phase, fit in fits.items()
    }
    acceptance = describe(profile.acceptance, drafts) if drafts else None
    found["acceptance"] = {
        "draft_tokens": sum(acceptance.trials) if acceptance else 0,
        "measured_means": acceptance.measured_means if acceptance else [],
        "model_means": acceptance.model_means if acceptance else [],
        "measured_auc": acceptance.measured_auc if acceptance else [],
        "model_auc": acceptance.model_auc if acceptance else [],
    }
    found["exits"] = [msgspec.to_builtins(each) for each in profile.exits]
    found["matches"] = msgspec.to_builtins(profile.matches)
    found["splits"] = [msgspec.to_builtins(each) for each in profile.splits]
    found["ahead"] = msgspec.to_builtins(profile.ahead)
    return found


def drift_range(slower: Floats) -> tuple[float, float]:
    low, high = np.quantile(slower, (0.05, 0.95)).tolist()
    return low, high


def _percent(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.1%}"


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
