"""How far a training run is, in one file: weights, optimizer and the best policy so far as tensors, the rest as JSON.

Called by models/training/train.py. A safetensors file holds no code; the JSON lies in its header, so that one rename
replaces both. It must never let a run go on under another configuration than it began with.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..policies.policy import PolicyError
from .config import TrainConfig
from .torch_network import SetPolicy

NAME: Final = "checkpoint.safetensors"
VERSION: Final = 1
HEADER: Final = "faser"
FREE: Final = frozenset({"total_steps"})  # may differ: that is how one goes on


@dataclass(slots=True)
class TrainingProgress:
    """How far a run is, and the best it has seen."""

    steps: int = 0
    rollouts: int = 0
    since: int = 0  # judgements without a better one
    best: float = -math.inf  # mean worth on unseen engines over that of price, in its tokens
    history: list[float] = field(default_factory=list)  # of all judgements
    best_weights: dict[str, torch.Tensor] = field(default_factory=dict)


def save_checkpoint(folder: Path, policy: SetPolicy, standing: TrainingProgress, config: TrainConfig) -> None:
    """Replace the folder's checkpoint."""
    moments = {
        f"{index}.{name}": value
        for index, values in policy.optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }
    parts = {"policy": policy.state_dict(), "best": standing.best_weights, "optimizer": moments}
    tensors = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    facts = {
        "version": VERSION, "config": asdict(config), "steps": standing.steps, "rollouts": standing.rollouts,
        "since": standing.since, "best": standing.best, "history": standing.history,
    }  # fmt: skip
    part = folder / f"{NAME}.part"
    save_file(tensors, part, {HEADER: json.dumps(facts)})
    part.replace(folder / NAME)


def load_checkpoint(folder: Path, policy: SetPolicy, config: TrainConfig) -> TrainingProgress:
    """Put the checkpoint's weights into the policy; raise PolicyError for one of another configuration."""
    path = folder / NAME
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {}).get(HEADER, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        _check(facts, config)
        policy.load_state_dict(_part(tensors, "policy"))
        policy.optimizer.load_state_dict(policy.optimizer.state_dict() | {"state": _moments(tensors)})
        best = _part(tensors, "best")
        copy.deepcopy(policy.actor).load_state_dict(best)  # raises where it does not fit
        return TrainingProgress(
            int(facts["steps"]), int(facts["rollouts"]), int(facts["since"]), float(facts["best"]),
            [float(score) for score in facts["history"]], best,
        )  # fmt: skip
    except (OSError, SafetensorError, KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PolicyError(f"{path}: {reason}; expected a checkpoint of this configuration") from None


def _check(facts: Mapping[str, Any], config: TrainConfig) -> None:
    """Raise ValueError for a file of another layout, and for a run that began otherwise."""
    if facts.get("version") != VERSION:
        raise ValueError(f"checkpoint version {facts.get('version')}, this version has {VERSION}")
    found, wanted = facts["config"], asdict(config)
    others = [name for name in {**wanted, **found} if name not in FREE and found.get(name) != wanted.get(name)]
    if others:
        then, now = (", ".join(f"{name} {each.get(name)}" for name in others) for each in (found, wanted))
        raise ValueError(f"the run began with {then}, this configuration has {now} (total_steps alone may differ)")


def _part(tensors: Mapping[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}


def _moments(tensors: Mapping[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """Return the optimizer's state by parameter."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in _part(tensors, "optimizer").items():
        index, _, key = name.partition(".")
        found.setdefault(int(index), {})[key] = value
    return found
