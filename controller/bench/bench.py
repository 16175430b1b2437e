"""`faser bench`: FASER beside everything a user would pick instead, on real vLLM servers that take turns.

Called by controller/cli/bench.py. It owns every process it starts and ends them whatever happens; what was measured
until then is in the file and is printed. docs/guide/benchmark.md has the definitions.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from ...models.embedded.pair import EMBEDDED_K_MAX, TARGET_NAME, ensure_embedded_pair
from ...models.embedded.precision import DTYPES, DType
from ..decision.session import check_policy
from ..engine.launch import available_cores, default_threads, embedded_dtype
from ..engine.machine import ROOT, commit, machine_facts, versions
from ..errors import EngineError, FaserError, UsageError
from ..link.endpoint import socket_folder
from ..whole_file import require_folder, require_place
from .arm import Bed, require_available, server_arguments
from .arms import Tell
from .course import Advance, Bench
from .markdown import page
from .plan import (
    FULL_LOADS,
    FULL_RIVALS,
    POLICIES,
    QUICK_LOADS,
    QUICK_RIVALS,
    BenchPlan,
    length_of,
    parse_loads,
    parse_rivals,
)
from .progress import BenchProgress
from .result import BenchSettings, Results, read_results, summary
from .view import tables, write_picture
from .workload import MIXED, Mix, Replay, seconds_of_work

_QUICK_TABLE: Final = (0, 1, 3, 4)  # with the four rivals three pairs of servers to start
_ALL_LENGTHS: Final = (0, 1, 2, 3, 4)
_TINY_TOKENS: Final = 24
_CORE_EXPONENT: Final = 0.6  # an estimate, for this model's size
_TURN_S: Final = 6.0
_QUICK_TURN_S: Final = 1.5
_LEARN_S, _QUICK_LEARN_S = 20.0, 8.0
# A quick run ends within twelve minutes, also on a restless machine whose cores read 300 prompt tokens a second: five
# servers with 32 clients each have 160 prompts to read before anything is measured.
_QUICK_REPEAT_S: Final = 480.0
_QUICK_PROMPT_TOKENS, _PROMPT_TOKENS = 150, 300
_QUICK_PER_CLIENT, _PER_CLIENT = 12, 16


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `faser bench` was asked for; None means the default of a full or a quick run."""

    quick: bool = False
    json: bool = False
    loads: str | None = None
    rivals: str | None = None
    pairs: int | None = None
    traces: tuple[str, ...] = ()
    kinds: str = MIXED
    out: Path | None = None
    picture: Path | None = None
    policy: str = "price"
    seed: int = 0
    minutes: float | None = None
    turn_s: float | None = None
    trace_s: float = 60.0
    peak_rps: float | None = None
    warp: float = 60.0
    swell: bool = False
    threads: int | None = None
    max_tokens: int = 96
    note: str = ""
    resume: Path | None = None
    dtype: str | None = None
    held: int = 0
    starts: int = 1
    temperature: float = 0.0

    def number_type(self) -> DType:
        """Return in which numbers all servers compute."""
        if self.dtype is None:
            return embedded_dtype()
        for known in DTYPES:
            if known == self.dtype:
                return known
        raise UsageError(f"--dtype {self.dtype}", " or ".join(DTYPES))

    def plan(self) -> BenchPlan:
        """Return what is to be measured; raise UsageError for what cannot be."""
        default_loads = QUICK_LOADS if self.quick else FULL_LOADS
        loads = default_loads if self.loads is None and not self.traces else parse_loads(self.loads or "")
        rivals = (QUICK_RIVALS if self.quick else FULL_RIVALS) if self.rivals is None else parse_rivals(self.rivals)
        lengths = {length for arm in rivals if (length := length_of(arm)) is not None}
        turn_s = self.turn_s if self.turn_s is not None else (_QUICK_TURN_S if self.quick else _TURN_S)
        if not 0.1 <= turn_s <= 60.0:
            raise UsageError(f"--turn-seconds {turn_s:g}", "0.1 to 60")
        if not 8 <= self.max_tokens <= 512:
            raise UsageError(f"--max-tokens {self.max_tokens}", "8 to 512")
        return BenchPlan(
            loads=loads,
            replays=tuple(self._replay(name) for name in self.traces),
            mixes=tuple(Mix.parse(text.strip()) for text in dict.fromkeys(self.kinds.split(","))),
            rivals=rivals,
            pairs=self.pairs if self.pairs is not None else (3 if self.quick else 6),
            table_lengths=tuple(sorted({*(_QUICK_TABLE if self.quick else _ALL_LENGTHS), *lengths})),
            minutes=self.minutes if self.minutes is not None else (0.0 if self.quick or self.starts > 1 else 6.0),
            turn_s=turn_s,
            learn_s=0.0 if turn_s < 1.0 else (_QUICK_LEARN_S if self.quick else _LEARN_S),
            max_tokens=self.max_tokens,
            max_prompt_tokens=_QUICK_PROMPT_TOKENS if self.quick else _PROMPT_TOKENS,
            least_per_client=_QUICK_PER_CLIENT if self.quick else _PER_CLIENT,
            least_tokens=_TINY_TOKENS if turn_s < 1.0 else (128 if self.quick else 192),
            repeat_s=_QUICK_REPEAT_S if self.quick else math.inf,
            seed=self.seed,
            held=self.held,
            starts=self.starts,
            temperature=self.temperature,
        )

    def _replay(self, trace: str) -> Replay:
        peak = self.peak_rps if self.peak_rps is not None else round(speed_of_cores() / seconds_of_work(trace), 2)
        return Replay(trace, self.trace_s, peak, self.warp, peak / 6.0 if self.swell else None)


def speed_of_cores() -> float:
    """Return how much faster than with one thread an engine is by default: more cores help less and less; a guess."""
    return math.pow(default_threads(available_cores()), _CORE_EXPONENT)


def run_bench(options: BenchOptions) -> int:
    """Measure, write, print; return 0, or 130 after Ctrl-C. A rival that failed is named, and no failure of ours."""
    plan, dtype = options.plan(), options.number_type()
    require_policies(options, plan)
    console = Console(stderr=True, highlight=False)
    missing = missing_rivals(options, plan)
    folder, path = new_places(options)
    results = fresh_results(options, plan, dtype)
    if options.resume is not None:
        results = _resumed(options.resume, options.out, results, plan.rivals)
    require_places(options, path)
    tell_missing(missing, results, console)
    with socket_folder("bench") as sockets:
        bed = bed_of(options, plan, results.settings, sockets, folder)
        make = partial(Bench, plan, results, path, bed)
        code, failure = measure(make, console)
    show(options, results, path, console)
    if failure is not None:
        raise failure
    return code


def require_policies(options: BenchOptions, plan: BenchPlan) -> None:
    """Raise PolicyError for a policy that no engine could be steered by."""
    for policy in (options.policy, *(rival for rival in plan.rivals if rival in POLICIES)):
        check_policy(policy)


def new_places(options: BenchOptions) -> tuple[Path, Path]:
    """Return the folder of logs, and the results file."""
    folder = (Path("runs") / time.strftime("bench-%Y%m%d-%H%M%S")).absolute()
    return folder, options.resume or options.out or folder / "result.json"


def fresh_results(options: BenchOptions, plan: BenchPlan, dtype: DType) -> Results:
    """Return the results of a run that begins now."""
    machine = msgspec.structs.replace(machine_facts(), dtype=dtype)
    return Results(machine, versions(), commit(), _settings(options, plan, dtype), note=options.note)


def require_places(options: BenchOptions, path: Path) -> None:
    """Raise UsageError where results or picture could not be written."""
    if options.resume is None and path.exists():
        raise UsageError(f"--out {path} exists", "a new file, or --resume to go on with it")
    for place, option in ((path, "--out"), (options.picture, "--picture")):
        if place is not None:
            require_folder(place.absolute().parent, option)
            require_place(place, option)


def tell_missing(missing: Mapping[str, str], results: Results, console: Console) -> None:
    """Say which rivals are left out, and keep it."""
    for rival, reason in missing.items():
        console.print(f"faser: left out: {reason}", soft_wrap=True)
        results.failed[rival] = reason


def bed_of(options: BenchOptions, plan: BenchPlan, settings: BenchSettings, sockets: Path, folder: Path) -> Bed:
    """Return where the servers are put; makes the embedded pair if it is not there yet."""
    hows = (settings.threads, options.number_type(), bool(plan.held), plan.temperature > 0.0)
    return Bed(ensure_embedded_pair(), sockets, folder, options.policy, *hows)


def missing_rivals(options: BenchOptions, plan: BenchPlan) -> dict[str, str]:
    """Return which rivals cannot run here, and why; raise EngineError for one that was asked for by name."""
    missing = {}
    for rival in plan.rivals:
        try:
            require_available(rival)
        except EngineError as error:
            if options.rivals is not None:
                raise
            missing[rival] = str(error)
    return missing


def print_tables(path: Path) -> None:
    """Print the Markdown tables of a results file."""
    sys.stdout.write(page(_read(path, "--table")) + "\n")


def _read(path: Path, option: str) -> Results:
    """Return what a file holds; raise UsageError if it holds no results."""
    try:
        return read_results(path)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}", "the results of an earlier run") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{option} {path}: {error}", "the results of an earlier run") from None


def _resumed(path: Path, out: Path | None, fresh: Results, rivals: Sequence[str]) -> Results:
    """Return what a file holds, to go on with; raise UsageError where what comes could not be compared with it."""
    require_no_out(out)
    return go_on(path, _read(path, "--resume"), fresh, rivals)


def require_no_out(out: Path | None) -> None:
    """Raise UsageError for a second file beside the one to go on with."""
    if out is not None:
        raise UsageError(f"--out {out} beside --resume", "one of them: a resumed run goes on in its own file")


def go_on(path: Path, found: Results, fresh: Results, rivals: Sequence[str]) -> Results:
    """Return an earlier run to be gone on with; raise UsageError where its turns could not be compared with these."""
    if difference := found.unlike(fresh):
        raise UsageError(f"--resume {path}: {difference}", "a run on the same machine with the same settings")
    return found.continued(fresh, rivals)


def measure(make: Callable[[Tell, Advance], Bench], console: Console) -> tuple[int, FaserError | None]:
    """Run the benchmark that `make` returns; return the exit code, and what ended it early."""
    with BenchProgress.shown(console) as progress:
        try:
            asyncio.run(_stopping(make(progress.tell, progress.advance), progress))
        except asyncio.CancelledError:
            return 130, None
        except FaserError as error:
            return error.exit_code, error
    return 0, None


async def _stopping(bench: Bench, progress: BenchProgress) -> None:
    """Run until done; Ctrl-C and SIGTERM cancel, and the servers are ended in order."""
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    telling = asyncio.create_task(progress.keep_telling())
    try:
        await bench.run()
    finally:
        telling.cancel()
        with suppress(asyncio.CancelledError):
            await telling


def show(options: BenchOptions, results: Results, path: Path, console: Console) -> None:
    """Print tables and the JSON line, draw the picture."""
    if results.load_points():  # nothing but a sweep has no points to show
        picture = options.picture or path.with_suffix(".svg")
        write_picture(results, picture)
        wide = Console(stderr=options.json, highlight=False, width=None if sys.stdout.isatty() else 220)
        wide.print(tables(results))
        console.print(f"faser: results {path}, picture {picture}", soft_wrap=True)
    if options.json:
        sys.stdout.write(json.dumps(summary(results)) + "\n")
        sys.stdout.flush()


def _settings(options: BenchOptions, plan: BenchPlan, dtype: DType) -> BenchSettings:
    card = json.loads((ROOT / "models" / "weights" / "drafter.card.json").read_text())
    return BenchSettings(
        target=TARGET_NAME, drafter_sha256=card["sha256"], policy=options.policy, k_max=EMBEDDED_K_MAX,
        threads=options.threads or default_threads(available_cores()), turn_s=plan.turn_s, slice_s=plan.slice_s,
        max_tokens=plan.max_tokens, max_prompt_tokens=plan.max_prompt_tokens, seed=plan.seed, pairs=plan.pairs,
        arguments=server_arguments(dtype, bool(plan.held or plan.temperature)), held=plan.held, has_huge_pages=True,
        temperature=plan.temperature, learn_s=plan.learn_s,
    )  # fmt: skip
