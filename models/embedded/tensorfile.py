"""Read and write safetensors files with bfloat16, without torch: numpy knows no bfloat16, so its bits travel as uint16.

Called by models/embedded/target.py and models/embedded/eagle3.py when they fill the model cache. It must never load a
whole model into memory twice and never interpret anything but the header's JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I8": "|i1"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: `dtype` is safetensors' name for it; a BF16 tensor's `data` holds its bits as uint16."""

    dtype: str
    data: Array

    def as_float32(self) -> Array:
        """Return the values as float32."""
        if self.dtype == "BF16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data.astype(np.float32)


def to_bfloat16(values: Array) -> Tensor:
    """Round finite float32 values to the nearest bfloat16, ties to even, as torch does."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return Tensor("BF16", ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


@dataclass(frozen=True, slots=True)
class PendingTensor:
    """A tensor that is yet to be made, so that only one is in memory while a file is written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def size_bytes(self) -> int:
        return np.dtype(_DTYPES[self.dtype]).itemsize * prod(self.shape)


def write(path: Path, entries: Iterable[PendingTensor], on_bytes: Callable[[int, int], None] | None = None) -> None:
    """Write a safetensors file; `on_bytes(done, total)` is told after each tensor."""
    entries = list(entries)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    total = 0
    for entry in entries:
        end = total + entry.size_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [total, end]}
        total = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            tensor = entry.make()
            if tensor.dtype != entry.dtype or tensor.data.shape != entry.shape:
                raise ValueError(f"{entry.name}: made {tensor.dtype} {tensor.data.shape}, announced {entry}")
            file.write(np.ascontiguousarray(tensor.data, dtype=_DTYPES[entry.dtype]).data)
            done += entry.size_bytes
            if on_bytes:
                on_bytes(done, total)


def read(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a safetensors file, read-only, by name."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= 1 << 24:
            raise ValueError(f"{path} is no safetensors file: header of {length} bytes")
        header = json.loads(file.read(length))
    raw = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
    tensors = {}
    for name, field in header.items():
        if name == "__metadata__":
            continue
        first, end = field["data_offsets"]
        tensors[name] = Tensor(field["dtype"], raw[first:end].view(_DTYPES[field["dtype"]]).reshape(field["shape"]))
    return tensors
