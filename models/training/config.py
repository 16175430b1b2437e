"""One training run of the learned policy, as a TOML file says it.

Called by models/training/train.py and its parts, and by the CLI.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from ..learned.network import HEAD
from ..policies.policy import PolicyError


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run. Every field can stand in the TOML file."""

    head: str = HEAD  # what the network gives; there is no other
    seed: int = 0
    hidden: int = 32
    worlds: int = 48  # random engines to train in
    exits_share: float = 0.0  # of these, have exit heads, and prune
    copies_share: float = 0.0  # of these, copy drafts from requests' own texts
    slots: int = 64  # most requests in a batch
    engines: int = 32  # simulated at once
    rollout_steps: int = 64
    total_steps: int = 400_000  # pieces of advice, one in 16 engine steps
    spans: int = 48  # pieces of advice in an episode
    learning_rate: float = 3e-4
    epochs: int = 4
    minibatch: int = 512
    discount: float = 0.1  # per piece of advice
    late_cost: float = 4.0  # of a late token, in tokens in time
    trace_decay: float = 0.9
    entropy: float = 0.0
    clip: float = 0.15
    judge_every: int = 8  # rollouts
    patience: int = 8  # judgements without a better one, then it stops

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[float, float]] = {
            "seed": (0, 2**31 - 1), "hidden": (4, 256), "worlds": (1, 1024), "slots": (1, 256), "engines": (1, 4096),
            "rollout_steps": (2, 4096), "spans": (1, 10_000), "minibatch": (2, 65536), "epochs": (1, 100),
            "judge_every": (1, 10**6), "patience": (1, 10**6),
            "exits_share": (0.0, 1.0), "copies_share": (0.0, 1.0), "learning_rate": (1e-7, 1.0),
            "total_steps": (0, 10**10), "discount": (0.0, 10.0), "trace_decay": (0.0, 1.0), "clip": (0.01, 1.0),
            "late_cost": (0.0, 100.0),
        }  # fmt: skip
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not math.isfinite(value) or not low <= value <= high:
                raise PolicyError(f"{name} {value}; expected {low:g}..{high:g}")
        if self.head != HEAD:
            raise PolicyError(f"head {self.head!r}; expected {HEAD!r}")


def load_config(path: Path) -> TrainConfig:
    """Read a TOML file; raise PolicyError for unknown keys and for values that cannot be."""
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read ({error.strerror}); expected a TOML file") from None
    except ValueError as error:
        raise PolicyError(f"{path}: {error}; expected TOML") from None
    known = {field.name: field for field in fields(TrainConfig)}
    for name, value in found.items():
        if name not in known:
            raise PolicyError(f"{path}: unknown key {name}; expected {', '.join(known)}")
        kind = type(known[name].default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise PolicyError(f"{path}: {name} is {type(value).__name__}, expected {kind.__name__}")
    return TrainConfig(**found)
