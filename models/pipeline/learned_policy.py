"""`learned`: a small network over the environment's observation, in numpy, and the files it lies in.

Weights are safetensors, the manifest beside them JSON; both are checked before use and hold no code. Trained by
models/pipeline/train_pipeline.py; torch is not needed here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from ...engine_adapter.arrays import Singles
from ...env.pipeline.cluster import PipelineMove
from ...env.pipeline.constants import PipelineConstants
from ...env.pipeline.pipeline_actions import ACTION_SIZES, move_of
from ...env.pipeline.view import PIPELINE_FEATURES, ClusterView
from ..embedded.cache import sha256_of
from ..embedded.tensorfile import PendingTensor, Tensor, read, write
from ..policies.policy import PolicyError
from .pipeline_policy import LoadHint
from .shadows import SETS, day_costs

PIPELINE_MANIFEST_VERSION: Final = 1
RELEASED: Final = Path(__file__).parent.parent / "weights" / "pipeline.json"
LAYERS: Final = ("hidden_1", "hidden_2", "head")


def layer_shapes(hidden: int) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each layer."""
    return {
        "hidden_1": (len(PIPELINE_FEATURES), hidden),
        "hidden_2": (hidden, hidden),
        "head": (hidden, sum(ACTION_SIZES)),
    }


@dataclass(frozen=True, slots=True, eq=False)
class PipelineNetwork:
    """Two hidden layers of tanh and a head with a score for every value of every part of the action."""

    hidden: int
    tensors: dict[str, Singles]
    training: dict[str, Any] = field(default_factory=dict)

    def scores(self, observation: Singles) -> Singles:
        """Return (sum of ACTION_SIZES,) scores."""
        values = observation
        for name in LAYERS:
            values = values @ self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]
            values = np.tanh(values) if name != "head" else values
        return values

    def move(self, observation: Singles) -> PipelineMove:
        """Return the move whose parts score best."""
        ends = np.cumsum(ACTION_SIZES)[:-1]
        return move_of(np.array([int(part.argmax()) for part in np.split(self.scores(observation), ends)]))


@dataclass(slots=True)
class LearnedPipeline:
    """Follows a trained network; begins as `weigh` does."""

    network: PipelineNetwork
    constants: PipelineConstants
    name: str = "learned"
    keeps_idle: bool = True

    def start(self, hint: LoadHint) -> tuple[int, int]:
        """Begin with what was cheapest on another day."""
        return SETS[int(day_costs(hint.arrival_s, self.constants).argmin())]

    def decide(self, view: ClusterView) -> PipelineMove:
        """Do what scores best."""
        return self.network.move(view.vector())


def save_pipeline_network(network: PipelineNetwork, manifest: Path) -> None:
    """Write the manifest and, beside it, the weights."""
    path = manifest.with_suffix(".safetensors")
    write(path, [_entry(name, values) for name, values in sorted(network.tensors.items())])
    fields = {
        "manifest_version": PIPELINE_MANIFEST_VERSION,
        "features": [feature.name for feature in PIPELINE_FEATURES],
        "action_sizes": list(ACTION_SIZES),
        "hidden": network.hidden,
        "sha256": sha256_of(path),
        "training": network.training,
    }
    manifest.write_text(json.dumps(fields, indent=1) + "\n")


def _entry(name: str, values: Singles) -> PendingTensor:
    return PendingTensor(name, "F32", values.shape, lambda: Tensor("F32", values))


def load_pipeline_network(manifest: Path) -> PipelineNetwork:
    """Read a manifest and its weights; raise PolicyError unless they are whole and of this layout."""
    try:
        fields = json.loads(manifest.read_text())
        _require_layout(fields, manifest)
        path = manifest.with_suffix(".safetensors")
        if sha256_of(path) != fields["sha256"]:
            raise PolicyError(f"{path}: sha256 differs from its manifest's; fetch it again")
        tensors = {name: tensor.as_float32() for name, tensor in read(path).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolicyError(f"{manifest}: {error}; expected the manifest and weights of a pipeline policy") from None
    for name, (inputs, outputs) in layer_shapes(int(fields["hidden"])).items():
        for part, shape in ((f"{name}.weight", (inputs, outputs)), (f"{name}.bias", (outputs,))):
            if part not in tensors or tensors[part].shape != shape or not np.isfinite(tensors[part]).all():
                raise PolicyError(f"{path}: {part}; expected finite numbers of shape {shape}; train again")
    return PipelineNetwork(int(fields["hidden"]), tensors, dict(fields["training"]))


def _require_layout(fields: dict[str, Any], manifest: Path) -> None:
    """Raise PolicyError for a policy of another observation or action."""
    expected = {
        "manifest_version": PIPELINE_MANIFEST_VERSION,
        "features": [feature.name for feature in PIPELINE_FEATURES],
        "action_sizes": list(ACTION_SIZES),
    }
    for name, value in expected.items():
        if fields[name] != value:
            raise PolicyError(f"{manifest}: {name} is {str(fields[name])[:60]}, this version's differs; train again")
    if type(fields["hidden"]) is not int or not 1 <= fields["hidden"] <= 512:
        raise PolicyError(f"{manifest}: hidden {fields['hidden']}; expected a size in 1..512")
