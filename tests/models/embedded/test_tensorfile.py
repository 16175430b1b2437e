"""The safetensors files written without torch: the library and torch read the same numbers back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from faser.models.embedded.tensorfile import PendingTensor, Tensor, read, to_bfloat16, write


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**127), max_size=50))
def test_rounding_to_bfloat16_is_torchs(values: list[float]) -> None:
    ours = to_bfloat16(np.array(values, dtype=np.float32)).data
    theirs = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).view(torch.uint16).numpy()
    assert ours.tolist() == theirs.tolist()


def test_ties_round_to_even() -> None:
    halfway = np.array([0x3F808000, 0x3F818000], dtype=np.uint32).view(np.float32)
    assert to_bfloat16(halfway).data.tolist() == [0x3F80, 0x3F82]


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4) / 7
    tensors = {"a": to_bfloat16(values), "ids": Tensor("I64", np.array([3, -1], dtype=np.int64))}
    seen: list[tuple[int, int]] = []
    entries = [PendingTensor(name, t.dtype, t.data.shape, lambda t=t: t) for name, t in tensors.items()]  # type: ignore[misc]
    write(tmp_path / "m.safetensors", entries, lambda done, total: seen.append((done, total)))
    loaded = load_file(tmp_path / "m.safetensors")
    assert torch.equal(loaded["a"], torch.tensor(values).to(torch.bfloat16))
    assert loaded["ids"].tolist() == [3, -1]
    assert seen == [(24, 40), (40, 40)]


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    save_file({"b": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)}, tmp_path / "m.safetensors")
    assert read(tmp_path / "m.safetensors")["b"].as_float32().tolist() == [[1.5, -2.0]]


def test_a_tensor_of_another_shape_than_announced_is_refused(tmp_path: Path) -> None:
    entry = PendingTensor("a", "I8", (4,), lambda: Tensor("I8", np.zeros(3, dtype=np.int8)))
    with pytest.raises(ValueError, match="announced"):
        write(tmp_path / "m.safetensors", [entry])


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"GGUF\x03\0\0\0 and more")
    with pytest.raises(ValueError, match="no safetensors"):
        read(tmp_path / "m.safetensors")
