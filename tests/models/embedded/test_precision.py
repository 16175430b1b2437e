"""Which processors multiply bfloat16 row by row."""

from pathlib import Path

import pytest

from faser.models.embedded.precision import dtype_on, is_bfloat16_slow, number_bytes

AVX2 = "fpu sse4_2 avx avx2 fma"
AVX512 = f"{AVX2} avx512f avx512dq avx512bw avx512vl"


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (f"processor\t: 0\nflags\t\t: {AVX2}\n", True),
        (f"processor\t: 0\nflags\t\t: {AVX512}\n", False),
        (f"processor\t: 0\nflags\t\t: {AVX2} avx512f\n", True),  # without bw, dq and vl, as on a Xeon Phi
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", False),  # ARM: not x86
    ],
)
def test_it_is_told_by_the_processors_flags(tmp_path: Path, cpuinfo: str, expected: bool) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    assert is_bfloat16_slow(path) == expected


def test_where_nobody_can_tell_nothing_changes(tmp_path: Path) -> None:
    assert not is_bfloat16_slow(tmp_path / "missing")


def test_this_processor_computes_in_what_torch_multiplies_in_batches() -> None:
    """The flags say what torch itself does here: its oneDNN path for bfloat16 is there or not."""
    import torch

    is_fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert dtype_on("cpu") == ("bfloat16" if is_fast else "float32")


def test_a_gpu_beside_such_a_processor_computes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faser.models.embedded.precision.is_bfloat16_slow", lambda: True)
    assert (dtype_on("cpu"), dtype_on("cuda")) == ("float32", "bfloat16")
    assert [number_bytes(dtype_on(device)) for device in ("cpu", "cuda")] == [4, 2]
