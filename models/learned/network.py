"""The learned policy's network in numpy, and the files it lies in: safetensors and a JSON manifest, checked before use.

Called by models/learned/learned.py in the daemon, where torch is never imported; models/training/torch_network.py is
its twin for training. A set of requests goes in, so that their order carries no meaning: each is encoded by the same
layers, mean and maximum are pooled, and joined with what concerns the whole engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np

from ...engine_adapter.arrays import Singles
from ...engine_adapter.compiled import compiled
from ...env.layout.action_vector import ACTION
from ...env.layout.observation import GLOBAL_FEATURES, OBSERVATION_VERSION, REQUEST_FEATURES
from ..embedded.cache import sha256_of
from ..embedded.tensorfile import PendingTensor, Tensor, read, write
from ..policies.policy import PolicyError
from .advice import Advice

MANIFEST_VERSION: Final = 1
HEAD: Final = "values"  # what the outputs are; others there were lost to the price policy
OUTPUTS: Final = Advice._fields
REQUEST_INPUTS, GLOBAL_INPUTS = len(REQUEST_FEATURES), len(GLOBAL_FEATURES)
LAYERS: Final = ("encode_1", "encode_2", "trunk_1", "trunk_2", "head")


def shapes(hidden: int) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each layer."""
    wide = 2 * hidden
    return {
        "encode_1": (REQUEST_INPUTS, hidden),
        "encode_2": (hidden, hidden),
        "trunk_1": (2 * hidden + GLOBAL_INPUTS, wide),
        "trunk_2": (wide, wide),
        "head": (wide, len(OUTPUTS)),
    }


@dataclass(frozen=True, slots=True)
class Manifest:
    """What lies beside the weights; a file of another layout is refused."""

    hidden: int
    k_max: int  # of the engines in training; advice holds for any
    sha256: str
    training: dict[str, object]  # configuration, seed, steps, seconds, worlds, commit
    results: dict[str, object]  # on held-out worlds
    low: tuple[float, ...]  # of each global feature in training, see models/learned/learned.py
    high: tuple[float, ...]

    def as_json(self) -> str:
        """Return the file's content."""
        fields = {
            "manifest_version": MANIFEST_VERSION,
            "observation_version": OBSERVATION_VERSION,
            "request_features": [feature.name for feature in REQUEST_FEATURES],
            "global_features": [feature.name for feature in GLOBAL_FEATURES],
            "action": [component.name for component in ACTION],
            "outputs": list(OUTPUTS),
            "normalisation": "none: the observation's layout bounds every feature",
            "head": HEAD,
            **{name: getattr(self, name) for name in self.__slots__},
        }
        return json.dumps(fields, indent=1) + "\n"


class Network:
    """The layers as arrays; `forward` is all that runs in the daemon."""

    def __init__(self, manifest: Manifest, tensors: dict[str, Singles]) -> None:
        self.manifest = manifest
        self.tensors = tensors
        self._layers = [(tensors[f"{name}.weight"], tensors[f"{name}.bias"]) for name in LAYERS]

    def forward(self, requests: Singles, overall: Singles) -> Singles:
        """Return the outputs, (outputs,), for n requests' features."""
        (w1, b1), (w2, b2), (w3, b3), (w4, b4), (w5, b5) = self._layers
        encoded = _layer(_layer(requests, w1, b1), w2, b2)
        pooled = np.zeros(2 * w2.shape[1] + len(overall), np.float32)
        _pool(encoded, overall, pooled)
        trunk = _layer(_layer(pooled, w3, b3), w4, b4)
        return cast(Singles, np.dot(trunk, w5) + b5)


def _layer(values: Singles, weight: Singles, bias: Singles) -> Singles:
    result: Singles = np.dot(values, weight)
    result += bias
    return np.tanh(result, out=result)


@compiled
def _pool(encoded: Singles, overall: Singles, pooled: Singles) -> None:
    """Fill in mean and maximum over the requests, 0 without any, and what concerns the whole engine."""
    n, wide = encoded.shape
    for j in range(wide if n else 0):
        pooled[wide + j] = -np.inf
    for i in range(n):
        for j in range(wide):
            pooled[j] += encoded[i, j]
            pooled[wide + j] = max(pooled[wide + j], encoded[i, j])
    for j in range(wide if n else 0):
        pooled[j] /= np.float32(n)
    for j in range(len(overall)):
        pooled[2 * wide + j] = overall[j]


def save_network(network: Network, folder: Path, name: str) -> None:
    """Write NAME.safetensors and NAME.json."""
    from dataclasses import replace

    path = folder / f"{name}.safetensors"
    write(path, [_entry(key, values) for key, values in sorted(network.tensors.items())])
    manifest = replace(network.manifest, sha256=sha256_of(path))
    (folder / f"{name}.json").write_text(manifest.as_json())


def _entry(name: str, values: Singles) -> PendingTensor:
    return PendingTensor(name, "F32", values.shape, lambda: Tensor("F32", values))


def load_network(manifest_path: Path) -> Network:
    """Read a manifest and the weights beside it; raise PolicyError unless they are whole and of this layout."""
    try:
        fields = json.loads(manifest_path.read_text())
    except OSError as error:
        raise PolicyError(
            f"{manifest_path}: cannot be read ({error.strerror}); expected the manifest of a trained policy"
        ) from None
    except ValueError as error:
        raise PolicyError(f"{manifest_path}: {error}; expected the JSON manifest of a trained policy") from None
    if not isinstance(fields, dict):
        raise PolicyError(f"{manifest_path}: {type(fields).__name__}; expected the JSON object of a manifest")
    manifest = _checked(fields, manifest_path)
    path = manifest_path.with_suffix(".safetensors")
    try:
        digest = sha256_of(path)
        is_ours = digest == manifest.sha256
        tensors = (
            {name: tensor.as_float32() for name, tensor in read(path).items()} if digest == manifest.sha256 else {}
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PolicyError(f"{path}: {error}; expected the weights of {manifest_path.name}") from None
    if not is_ours:
        raise PolicyError(
            f"{path}: sha256 {digest[:12]}..., its manifest says {manifest.sha256[:12]}...; fetch it again"
        )
    for name, (inputs, outputs) in shapes(manifest.hidden).items():
        for part, shape in ((f"{name}.weight", (inputs, outputs)), (f"{name}.bias", (outputs,))):
            if part not in tensors or tensors[part].shape != shape:
                seen = tensors[part].shape if part in tensors else "nothing"
                raise PolicyError(f"{path}: {part} is {seen}, expected {shape}")
            if not np.isfinite(tensors[part]).all():
                raise PolicyError(f"{path}: {part} holds NaN or infinity; train again")
    return Network(manifest, tensors)


def _checked(fields: dict[str, object], path: Path) -> Manifest:
    hidden, k_max, sha256 = (fields.get(name) for name in ("hidden", "k_max", "sha256"))
    expected: dict[str, object] = {
        "manifest_version": MANIFEST_VERSION,
        "observation_version": OBSERVATION_VERSION,
        "request_features": [feature.name for feature in REQUEST_FEATURES],
        "global_features": [feature.name for feature in GLOBAL_FEATURES],
        "action": [component.name for component in ACTION],
        "head": HEAD,
        "outputs": list(OUTPUTS),
    }
    for name, value in expected.items():
        if fields.get(name) != value:
            raise PolicyError(
                f"{path}: {name} is {str(fields.get(name))[:60]}, this version has {str(value)[:60]}; train again"
            )
    low, high = fields.get("low"), fields.get("high")
    if not _is_size(hidden) or not _is_size(k_max) or not isinstance(sha256, str):
        raise PolicyError(f"{path}: hidden {hidden}, k_max {k_max}; expected sizes 1..512 and the weights' sha256")
    for values in (low, high):
        if not isinstance(values, list) or len(values) != GLOBAL_INPUTS or not all(map(_is_number, values)):
            raise PolicyError(f"{path}: low and high; expected {GLOBAL_INPUTS} finite numbers each")
    training, results = (fields.get(name) for name in ("training", "results"))
    return Manifest(
        cast(int, hidden), cast(int, k_max), sha256,
        training if isinstance(training, dict) else {}, results if isinstance(results, dict) else {},
        tuple(cast(list[float], low)), tuple(cast(list[float], high)),
    )  # fmt: skip


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= 512


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(cast(float, value)) < 1e9
