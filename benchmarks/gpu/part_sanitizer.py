"""NVIDIA's compute-sanitizer over the Triton kernels: races in shared memory, accesses out of bounds, wrong barriers.

Two controls must be seen: an array that is too short, and the same kernels without a barrier. Races between streams are
none of its business: it looks at shared memory alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from checkout import Missing, part_ends_s

PROGRAM: Final = Path(__file__).with_name("watched.py")
CARRIED: Final = Path("nvidia", "cu13", "compute-sanitizer", "compute-sanitizer")  # in what pack_vllm.py packs
TOOLKIT: Final = Path("/usr/local/cuda/bin/compute-sanitizer")
KERNELS: Final = ("_add_norm", "_gate", "_rope_store", "_plan", "_score", "_decide")  # torch's own are not looked at
RUN_S: Final = 45.0  # at most, of one run
WRITE_S: Final = 5.0  # kept for writing down what was found
SUMMARY: Final = re.compile(r"^=+ (?:RACECHECK|ERROR) SUMMARY: ([\d,]+)", re.MULTILINE)
# Racecheck names the kernel in the line of the race; memcheck in the line behind the access.
PLACE: Final = re.compile(r"^=+ .*\bat (\w+)(?:\([^)]*\))?\+0x", re.MULTILINE)
BARRIER: Final = re.compile(r"(?:@!?%\w+\s+)?\b(?:bar|barrier(?:\.cta)?)\.sync\b[^;]*;")
OVERRIDDEN: Final = "Overriding kernel with file"  # says Triton
MOST_LINES: Final = 60  # of a log, in the results
# The program's compilers are no business of the tool's. What the driver logs by itself is no error of a kernel.
ALL_CHECKS: Final = ("--target-processes", "application-only", "--launch-timeout", "100", "--print-limit", "1000",
                     "--show-backtrace", "no")  # fmt: skip
OWN: Final = {"memcheck": ("--report-api-errors", "no")}


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
        command = [str(self.tool), "--tool", check, "--log-file", str(log), *ALL_CHECKS, *OWN.get(check, ())]
        command += [part for kernel in KERNELS for part in ("--kernel-name", f"kns={kernel}")]
        begun_s = time.monotonic()
        said = self.plainly(output, command, options, environment)
        text = log.read_text(errors="replace") if log.exists() else ""
        summary, places, has_ended = SUMMARY.search(text), set(PLACE.findall(text)) & set(KERNELS), output.exists()
        if summary is None or not (places or has_ended):  # a kernel's error may end the program, nothing else may
            return {"failed": _ends(text, said)}
        return {
            "errors": int(summary[1].replace(",", "")), "in": sorted(places), "log": text.splitlines()[:MOST_LINES],
            "overridden": said.count(OVERRIDDEN), "has_ended": has_ended, **_told(output),
            "seconds": round(time.monotonic() - begun_s, 1),
        }  # fmt: skip

    def plainly(self, output: Path, before: list[str], options: tuple[str, ...], environment: dict[str, str]) -> str:
        """Run the program behind `before`, in time; return what it said."""
        # Each array by itself, so that its end is an allocation's; kernels compiled once, for all runs.
        own = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TRITON_CACHE_DIR": str(self.folder / "cache")} | environment
        limit_s = min(RUN_S, self.ends_s - time.monotonic())
        if limit_s <= 0.0:
            return "no time was left"
        with subprocess.Popen(
            [*before, sys.executable, str(PROGRAM), str(output), *options], env=os.environ | own, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                return process.communicate(timeout=limit_s)[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the program too, not the tool alone
                return f"{process.communicate()[0]}\nit had {limit_s:.0f} s"


def measure(is_dry: bool) -> dict[str, Any]:
    """Return what each check and each control found; the dry run runs the same program with nobody watching."""
    ends_s = part_ends_s() - WRITE_S
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        if is_dry:
            return {"plain": unwatched(Sanitizer(Path(), folder, ends_s), "--dry-run")}
        found = checks(Sanitizer(find(), folder, ends_s))
    if all("failed" in own for name, own in found.items() if name != "plain"):
        raise RuntimeError(found["racecheck"]["failed"])
    return found


def unwatched(sanitizer: Sanitizer, *options: str, **environment: str) -> dict[str, Any]:
    """Return the runs that agreed with nobody watching; it compiles what later runs are to find."""
    output = sanitizer.folder / "plain.json"
    said = sanitizer.plainly(output, [], options, environment)
    if not output.exists():
        raise RuntimeError(_ends("", said))
    return _told(output)


def checks(sanitizer: Sanitizer) -> dict[str, Any]:
    """Run every check and every control; the one that must compile anew comes last."""
    dumped, changed = sanitizer.folder / "dumped", sanitizer.folder / "changed"
    plain = unwatched(sanitizer, TRITON_KERNEL_DUMP="1", TRITON_DUMP_DIR=str(dumped))
    found: dict[str, Any] = {"plain": plain | {"tool": _version(sanitizer.tool)}}
    found["racecheck"] = sanitizer.run("racecheck", "racecheck")
    found["memcheck"] = sanitizer.run("memcheck", "memcheck")
    found["too short"] = sanitizer.run("short", "memcheck", "--short") | {"expected_in": ["_plan"]}
    found["synccheck"] = sanitizer.run("synccheck", "synccheck")
    expected = without_barriers(dumped, changed)
    bare = {"TRITON_KERNEL_OVERRIDE": "1", "TRITON_OVERRIDE_DIR": str(changed)}
    bare["TRITON_CACHE_DIR"] = str(sanitizer.folder / "bare-cache")  # else those with barriers would be found
    found["no barriers"] = sanitizer.run("bare", "racecheck", **bare) | {"expected_in": expected}
    if found["no barriers"].get("overridden") == 0:
        found["no barriers"] = {"failed": "Triton took no kernel without barriers"}
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
    """Return where the tool is, the machine's own first; raise Missing."""
    on_path = shutil.which("compute-sanitizer")
    for tool in (*([Path(on_path)] if on_path else []), TOOLKIT, *(Path(folder, CARRIED) for folder in sys.path)):
        if os.access(tool, os.X_OK) and tool.is_file():
            return tool
    raise Missing("no compute-sanitizer; the CUDA toolkit has it, and pack_vllm.py carries it")


def _version(tool: Path) -> str:
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    return f"{tool}: {' '.join(said.split())[-60:]}"


def _told(output: Path) -> dict[str, Any]:
    return {"kernels": json.loads(output.read_text()) if output.exists() else {}}


def _ends(*texts: str) -> str:
    """Return the end of each."""
    told = (" / ".join(line for line in text.splitlines() if line.strip())[-300:] for text in texts)
    return " / ".join(filter(None, told)) or "nothing was said"
