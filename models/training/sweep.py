"""A sweep of trainings: every combination of seeds and of values of the recipe's fields, each in a folder of its own.

Called by controller/cli/training.py and, in the process that makes a run, by controller/cli/sweep_workers.py. Starts no
processes.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeAlias

from ..evaluation.evaluate import Decide
from ..learned.network import load_network
from ..policies.policy import PolicyError
from .config import TrainConfig
from .train import Trained, train

Value: TypeAlias = int | float | str
KINDS: Final[dict[str, type[Value]]] = {
    name: type(value) for name, value in asdict(TrainConfig()).items() if name != "seed"
}


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training to make."""

    values: dict[str, Value]  # what the sweep sets, the seed last
    config: TrainConfig
    folder: Path

    @property
    def name(self) -> str:
        """What it is called in progress lines and tables."""
        return " ".join(f"{field}={value}" for field, value in self.values.items())


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run: `trained`, or why not."""

    run: TrainingRun
    trained: Trained | None
    reason: str = ""
    pid: int | None = None  # of the process that made it; none where it was there already or its process died


def parsed(name: str, texts: Sequence[str]) -> tuple[Value, ...]:
    """Return values of a field of the recipe; raise PolicyError for an unknown field and for what cannot be read."""
    if name == "seed":
        raise PolicyError("seed among the values; expected --seeds")
    if name not in KINDS:
        raise PolicyError(f"unknown field {name}; expected {', '.join(KINDS)}")
    kind = KINDS[name]
    try:
        values: tuple[Value, ...] = tuple(kind(text) for text in texts)
    except ValueError:
        raise PolicyError(f"{name} {','.join(texts)}; expected {kind.__name__} with commas between") from None
    if len(set(values)) != len(values):
        raise PolicyError(f"{name} {','.join(texts)}; expected different values")
    return values


def grid(
    recipe: TrainConfig, seeds: Sequence[int], values: Mapping[str, Sequence[Value]], folder: Path
) -> list[TrainingRun]:
    """Return every combination; raise PolicyError if one of them cannot be trained."""
    names = sorted(values)  # the order of the flags must not move the folders
    return [
        _run(recipe, dict(zip((*names, "seed"), chosen, strict=True)), folder)
        for chosen in itertools.product(*(values[name] for name in names), seeds)
    ]


def _run(recipe: TrainConfig, values: dict[str, Value], folder: Path) -> TrainingRun:
    changes: dict[str, Any] = dict(values)
    place = "_".join(f"{name}-{value}" for name, value in values.items())
    return TrainingRun(values, replace(recipe, **changes), folder / place)


def finished(run: TrainingRun) -> Trained | None:
    """Return what a run gave before, by its manifest; raise PolicyError where another recipe's run lies."""
    path = run.folder / "policy.json"
    if not path.exists():
        return None
    try:
        about: dict[str, Any] = load_network(path).manifest.training
    except PolicyError:  # cut off while it was written, or of a layout that no policy reads any more
        return None
    if about.get("config") != asdict(run.config):
        raise PolicyError(f"{path}: made by another recipe; expected a folder of this sweep's own")
    scores = about["judgements"]
    return Trained(path, scores[0], max(scores), about["steps"], about["seconds"])


def make(run: TrainingRun, decide: Decide, commit: str) -> Outcome:
    """Train; what goes wrong is told, not raised, since it may have to cross to another process."""
    try:
        return Outcome(run, train(run.config, run.folder, decide, commit=commit), pid=os.getpid())
    except Exception as error:
        return failed(run, error, os.getpid())


def failed(run: TrainingRun, error: Exception, pid: int | None = None) -> Outcome:
    """Return the outcome of a run that an error ended."""
    lines = str(error).strip().splitlines() or [""]
    return Outcome(run, None, f"{type(error).__name__}: {lines[0]}".removesuffix(": "), pid)


def best_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes by their best judgement, failed ones last."""
    return sorted(outcomes, key=lambda outcome: -outcome.trained.best if outcome.trained else math.inf)


def means(outcomes: Sequence[Outcome]) -> list[tuple[dict[str, Value], float, int]]:
    """Return, for each combination of values, the mean best judgement over its seeds and their number, best first.

    Each seed is judged on engines of its own, so that only means over the same seeds can be compared.
    """
    groups: dict[tuple[tuple[str, Value], ...], list[float]] = {}
    for outcome in outcomes:
        if outcome.trained is not None:
            key = tuple((name, value) for name, value in outcome.run.values.items() if name != "seed")
            groups.setdefault(key, []).append(outcome.trained.best)
    found = [(dict(key), fmean(scores), len(scores)) for key, scores in groups.items()]
    return sorted(found, key=lambda entry: -entry[1])
