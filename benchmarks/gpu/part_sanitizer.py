"""NVIDIA's compute-sanitizer over every Triton kernel: races in shared memory, accesses out of bounds, wrong barriers.

Each check has its control, which must be found: the same kernels without a barrier, and an array that is too short.
Races between streams are none of its business: it looks at shared memory alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from checkout import Missing

PROGRAM: Final = Path(__file__).with_name("watched.py")
CARRIED: Final = Path("nvidia", "cu13", "compute-sanitizer", "compute-sanitizer")  # in what pack_vllm.py packs
TOOLKIT: Final = Path("/usr/local/cuda/bin/compute-sanitizer")
KERNELS: Final = ("_add_norm", "_gate", "_rope_store", "_plan", "_score", "_decide")  # torch's own are not looked at
LIMIT_S: Final = 130.0  # of all runs: below a part's own, which would take what was found along
SUMMARY: Final = re.compile(r"^=+ (?:RACECHECK|ERROR) SUMMARY: (\d+)", re.MULTILINE)
# Racecheck names the kernel that wrote; memcheck names it in the line behind the access.
PLACE: Final = re.compile(r"^=+ .*\bat (\w+)(?:\([^)]*\))?\+0x", re.MULTILINE)
BARRIER: Final = re.compile(r"(?:@!?%\w+\s+)?\b(?:bar|barrier(?:\.cta)?)\.sync\b[^;]*;")
MOST_LINES: Final = 20  # of a log, in the results


@dataclass(frozen=True, slots=True)
class Sanitizer:
    """The tool, a folder for what its runs write, and the monotonic time when they must have ended."""

    tool: Path
    folder: Path
    ends_s: float

    def run(self, name: str, check: str, *options: str, **environment: str) -> dict[str, Any]:
        """Return what one check found of the kernels: errors, the kernels they are in, the runs that agreed.

        Or why it found nothing: a run that fails or comes too late must not take those before it along.
        """
        log, output = (self.folder / f"{name}.{end}" for end in ("log", "json"))
        # Of the host's stack nothing is asked: it would be Python's own.
        command = [str(self.tool), "--tool", check, "--log-file", str(log), "--show-backtrace", "no"]
        command += [part for kernel in KERNELS for part in ("--kernel-name", f"kns={kernel}")]
        own = {"TRITON_CACHE_DIR": str(self.folder / name), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} | environment
        begun_s = time.monotonic()
        try:
            said = _watched(output, [*command, "--print-limit", "1000"], options, own, self.ends_s - begun_s)
        except subprocess.TimeoutExpired:
            said = "no time was left"
        text = log.read_text(errors="replace") if log.exists() else ""
        told, has_ended = SUMMARY.search(text), output.exists()  # an access that is found ends the program
        if told is None or (told[1] == "0" and not has_ended):
            return {"failed": _end(f"{text}\n{said}")}
        return {
            "errors": int(told[1]), "in": sorted(set(PLACE.findall(text))), "log": text.splitlines()[:MOST_LINES],
            "kernels": json.loads(output.read_text()) if has_ended else {},
            "seconds": round(time.monotonic() - begun_s, 1),
        }  # fmt: skip


def measure(is_dry: bool) -> dict[str, Any]:
    """Return what each check and each control found; the dry run runs the same program with nobody watching."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if is_dry:
            output = folder / "plain.json"
            said = _watched(output, [], ("--dry-run",), {}, LIMIT_S)
            if not output.exists():
                raise RuntimeError(_end(said))
            return {"plain": {"kernels": json.loads(output.read_text())}}
        found = checks(Sanitizer(find(), folder, time.monotonic() + LIMIT_S))
    if all("failed" in own for own in found.values()):
        raise RuntimeError(found["racecheck"]["failed"])
    return found


def checks(sanitizer: Sanitizer) -> dict[str, Any]:
    """Run every check, and its control behind it."""
    dumped, changed = sanitizer.folder / "dumped", sanitizer.folder / "changed"
    found = {"racecheck": sanitizer.run("racecheck", "racecheck", TRITON_KERNEL_DUMP="1", TRITON_DUMP_DIR=str(dumped))}
    with_barriers = without_barriers(dumped, changed)
    bare = {"TRITON_KERNEL_OVERRIDE": "1", "TRITON_OVERRIDE_DIR": str(changed)}
    found["no barriers"] = sanitizer.run("bare", "racecheck", **bare) | {"expected_in": with_barriers}
    found["memcheck"] = sanitizer.run("memcheck", "memcheck")
    found["too short"] = sanitizer.run("short", "memcheck", "--short") | {"expected_in": ["_plan"]}
    found["synccheck"] = sanitizer.run("synccheck", "synccheck")
    return found


def without_barriers(dumped: Path, changed: Path) -> list[str]:
    """Write each kernel's PTX anew without its barriers; return the names of those that have any."""
    names = set()
    for path in sorted(dumped.rglob("*.ptx")):
        bare, count = BARRIER.subn("", path.read_text())
        target = changed / path.relative_to(dumped)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(bare)
        names |= {path.stem} if count else set()
    return sorted(names)


def find() -> Path:
    """Return where the tool is; raise Missing."""
    carried = (Path(folder, CARRIED) for folder in sys.path)
    on_path = shutil.which("compute-sanitizer")
    for tool in (*carried, *([Path(on_path)] if on_path else []), TOOLKIT):
        if os.access(tool, os.X_OK) and tool.is_file():
            return tool
    raise Missing("no compute-sanitizer; pack_vllm.py carries it, and so does the CUDA toolkit")


def _watched(
    output: Path, before: list[str], options: tuple[str, ...], environment: dict[str, str], limit_s: float
) -> str:
    """Run the program; return what it said."""
    return subprocess.run(
        [*before, sys.executable, str(PROGRAM), str(output), *options], env=os.environ | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=max(limit_s, 0.01), check=False,
    ).stdout  # fmt: skip


def _end(text: str) -> str:
    return " / ".join(line for line in text.splitlines() if line.strip())[-500:] or "nothing was said"
