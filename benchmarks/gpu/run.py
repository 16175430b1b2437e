"""Everything that only a GPU can show, in one command of under nine minutes: `python benchmarks/gpu/run.py`.

Runs part after part and writes each one's result into one JSON file at once; run again, it goes on behind what is
done. `--dry-run` does all of it on the CPU with tiny sizes (the kernels in Triton's interpreter), to see that it works:
its times mean nothing. README.md says what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
DEFAULT_OUTPUT = FOLDER.parent / "results" / "gpu.json"
VERSION = 1
MARGIN = 1.5  # a part is begun if so many times the longest of its kind still fits

Part = Callable[[], dict[str, Any]]


class Results:
    """The file: what it was measured on, with what settings, and what each finished part found."""

    def __init__(self, path: Path, machine: dict[str, Any], settings: dict[str, Any]) -> None:
        self._path = path
        self._content: dict[str, Any] = {"version": VERSION, "machine": machine, "settings": settings, "parts": {}}
        if not path.exists():
            return
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise SystemExit(f"{path}: cannot be read ({error}); delete it or give another --output") from None
        for name in ("version", "machine", "settings"):
            if not isinstance(found, dict) or found.get(name) != self._content[name]:
                raise SystemExit(f"{path}: made with another {name} than this run's; give another --output")
        self._content = found

    def has(self, name: str) -> bool:
        """Say whether a part is finished; one that failed is not."""
        return "result" in self._content["parts"].get(name, {})

    def put(self, name: str, part: dict[str, Any]) -> None:
        """Write the file anew; a reader sees the old one or the new one."""
        self._content["parts"][name] = part
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._content, indent=1) + "\n")
        os.replace(partial, self._path)


def plan(machine: Any, options: argparse.Namespace) -> Iterator[tuple[str, Part]]:
    """Yield every part with its name; what stands before a slash is its kind."""
    import part_decoder
    import part_kernel
    import part_overlap
    import part_partitions
    import part_pruning
    import part_training
    import part_vllm
    import shapes
    from pair import Pair, Sizes

    sizes = Sizes(tuple(options.requests), options.length, options.context, options.rounds)
    drafter = shapes.TINY_DRAFTER if machine.is_dry else shapes.DRAFTER
    targets = shapes.TINY_TARGETS if machine.is_dry else {name: shapes.TARGETS[name] for name in options.targets}
    built: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in built:
            built.clear()  # two targets never fit
            built[name] = Pair(machine, drafter, targets[name], sizes)
        return built[name]

    yield "partitions", lambda: part_partitions.measure(machine)
    yield "decoder", lambda: part_decoder.measure(machine)
    yield "kernel", lambda: part_kernel.measure(machine, list(sizes.requests), sizes.length, 3 * sizes.rounds)
    for name in targets:
        for requests in sizes.requests:
            yield f"overlap {name}/{requests}", lambda n=name, r=requests: part_overlap.measure(pair(n), r)
        for requests in sizes.requests[1::2]:
            yield f"pruning {name}/{requests}", lambda n=name, r=requests: part_pruning.measure(pair(n), r)

    def alone(measure: Part) -> dict[str, Any]:
        built.clear()
        machine.forget()
        return measure()

    yield "training", lambda: alone(lambda: part_training.measure(machine))
    if not machine.is_dry:
        target = shapes.TARGETS["qwen3-8b"]
        yield "vllm", lambda: alone(lambda: part_vllm.measure(drafter, target, 8, sizes.length, 128))


def run(machine: Any, options: argparse.Namespace) -> int:
    """Run what is not done yet, as far as the time goes; return the exit status."""
    asked = {name: getattr(options, name) for name in ("requests", "length", "context", "rounds", "targets")}
    results = Results(options.output, machine.facts(), asked)
    return run_parts(plan(machine, options), results, options, lambda: machine.forget())


def run_parts(
    parts: Iterable[tuple[str, Part]], results: Results, options: argparse.Namespace, forget: Callable[[], None]
) -> int:
    """Run the parts that are not done yet; each one's result is in the file before the next begins."""
    begun = time.monotonic()
    longest: dict[str, float] = {}
    failed = False
    for name, measure in parts:
        if results.has(name) or not name.startswith(options.only):
            continue
        kind, now = name.split("/")[0], time.monotonic()
        if now - begun + MARGIN * longest.get(kind, 0.0) > options.seconds:
            print(f"gpu: {options.seconds:g} s are over before {name!r}; run again to go on", flush=True)
            return 1 if failed else 3
        try:
            part: dict[str, Any] = {"result": measure()}
        except Exception as error:
            traceback.print_exc()
            with contextlib.suppress(Exception):
                forget()  # what the part left behind would take the next one's memory
            part, failed = {"error": f"{type(error).__name__}: {error}"[:500]}, True
        spent = time.monotonic() - now
        longest[kind] = max(longest.get(kind, 0.0), spent)
        results.put(name, part | {"seconds": round(spent, 2)})
        print(f"gpu: {name}: {'done' if 'result' in part else part['error']} in {spent:.1f} s", flush=True)
    print(f"gpu: results in {options.output}", flush=True)
    return 1 if failed else 0


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Return the options; the dry run's are small unless given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None, help="JSON file; what is in it is not run again")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny sizes")
    parser.add_argument("--only", default="", help="parts whose name begins so, such as 'overlap qwen3-8b'")
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no part that would end after these")
    parser.add_argument("--requests", type=int, nargs="+", default=None, help="batch sizes")
    parser.add_argument("--targets", nargs="+", default=["qwen3-8b", "qwen3-32b"], choices=["qwen3-8b", "qwen3-32b"])
    parser.add_argument("--length", type=int, default=None, help="draft tokens per request")
    parser.add_argument("--context", type=int, default=None, help="tokens of each request's context")
    parser.add_argument("--rounds", type=int, default=None, help="times that each arm is run")
    options = parser.parse_args(given)
    small, whole = ([1, 2, 4], 2, 8, 2), ([1, 4, 8, 16, 32, 64], 4, 1024, 15)
    for name, one, other in zip(("requests", "length", "context", "rounds"), small, whole, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, one if options.dry_run else other)
    if min(options.requests) < 1 or options.length < 1 or options.context < 1 or options.rounds < 1:
        parser.error("requests, length, context and rounds: expected numbers of at least 1")
    if options.output is None:
        if options.dry_run:
            parser.error("--dry-run: give an --output; its figures are not to be taken for measured ones")
        options.output = DEFAULT_OUTPUT
    return options


def main() -> int:
    """Choose the machine and run."""
    options = arguments()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    sys.path.insert(0, str(FOLDER))
    from checkout import make_importable

    make_importable()
    import torch

    torch.set_grad_enabled(False)
    if not options.dry_run and not torch.cuda.is_available():
        print("gpu: no CUDA device; expected one, or --dry-run --output FILE", file=sys.stderr)
        return 2
    from machines import CudaMachine, HostMachine

    return run(HostMachine() if options.dry_run else CudaMachine(), options)


if __name__ == "__main__":
    sys.exit(main())
