"""`faser demo`: the embedded model on a real vLLM, steered by a real sidecar, under a replayed production load.

Called by the CLI. It owns every process it starts and ends them whatever happens; what was measured until then is
printed and stays readable.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from ...env.workload.workload import TimedRequest
from ...models.embedded.pair import EMBEDDED_K_MAX, ensure_embedded_pair
from ..calibrate.starvation import WaitingMeter, save_waiting
from ..config import Config
from ..engine.launch import EngineLaunch, available_cores, require_supported_vllm
from ..engine.load_generator import LoadGenerator, LoadOptions
from ..engine.load_summary import RequestResult
from ..engine.processes import ProcessTree, deferred_interrupts, ignored_interrupts, stopping_on_sigterm
from ..engine.running import RunningEngine
from ..engine.serve import embedded_launch
from ..engine.sidecar_child import await_introduction, own_sidecar
from ..errors import EngineError, FaserError
from ..link.ask import ask
from ..link.endpoint import socket_folder
from ..progress import ShowProgress, progress_bar
from ..reports.run_report import write_report
from ..telemetry.telemetry_file import read_whole
from .comparison import Bystanders, SideBySide, compared_until_s, plain_launch, serve_plainly
from .configure import own_config
from .load import (
    PACES,
    PEAK_OVER_SERVED,
    TRACE,
    make_requests,
    peak_rps,
    token_ms,
    trial_requests,
    with_classes,
)
from .options import DemoOptions
from .picture import write_picture
from .result import DemoResult, figures_of_comparison, figures_of_load, figures_of_telemetry, final_table
from .view import View

# A prompt's chunk holds every other request up: 0.4 s of prefill instead of the 1.5 s of vLLM's default.
_ENGINE_ARGUMENTS: Final[tuple[str, ...]] = ("--max-num-batched-tokens", "512")
_WARM_UP: Final = TimedRequest(0.0, "Count from one to twenty.", "chat", 24)
_INTRODUCTION_S: Final = 20.0
_LOOK_S: Final = 0.5
MOST_PLAIN: Final = 1.5  # times as long as its requests arrive, and some seconds
_PLAIN_DRAIN_S: Final = 15.0


def run_demo(options: DemoOptions) -> int:
    """Run the demo; return 0, 1 if a request failed, 130 after Ctrl-C."""
    require_supported_vllm()
    if options.peak_rps is not None:  # one that the trace does not have is told before anything starts
        make_requests(options.duration_s, options.seed, options.peak_rps)
    with socket_folder("demo") as sockets, stopping_on_sigterm():
        demo = Demo(options, own_config(options, sockets))
        processes = ExitStack()
        try:
            demo.run(processes)
            demo.compare(processes)
        finally:
            with ignored_interrupts():
                demo.stop(processes)
                code = demo.conclude()
        return code


class Demo:
    """One run: engine, sidecar, load, figures."""

    def __init__(self, options: DemoOptions, config: Config) -> None:
        self.options = options
        self.config = config
        self.folder = config.store.path.parent
        self.generator: LoadGenerator | None = None
        self.is_interrupted = False
        self._peak_rps = 0.0  # not known yet
        self._failure: EngineError | None = None
        self._running = ""  # what is to be stopped
        self._requests: Sequence[TimedRequest] = ()
        self._comparison: SideBySide | None = None
        self._disturbed: list[str] = []
        self._console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """Tell the user what happens now."""
        self._console.print(f"faser: {text}", soft_wrap=True)

    def run(self, processes: ExitStack) -> None:
        """Start engine and sidecar in `processes` and send the load; remember Ctrl-C or a lost engine for the end."""
        try:
            engine, sidecar = self._start(processes)
            asyncio.run(self._load(engine, sidecar))
            engine.require_running()
        except KeyboardInterrupt:
            self.is_interrupted = True
        except EngineError as error:
            if self.generator is None:
                raise
            self._failure = error  # what was measured before is still worth showing

    def compare(self, processes: ExitStack) -> None:
        """Serve the load's first requests once more, by plain vLLM; that it cannot be done is no failure."""
        if not self.options.has_comparison or self.is_interrupted or self._failure or self.generator is None:
            return
        try:
            self.stop(processes)  # they would share its cores
            self._comparison = self._served_plainly(processes, self.generator)
        except KeyboardInterrupt:
            self.is_interrupted = True
        except FaserError as error:
            self.say(f"not compared with no speculation: {error}")

    def stop(self, processes: ExitStack) -> None:
        """End the engine, then the sidecar: its last records are in the file then."""
        if self._running:
            self.say(f"stopping {self._running}")
        self._running = ""
        processes.close()

    def conclude(self) -> int:
        """Print table or JSON, write report and result; raise the engine's error if it went away."""
        if self.generator is None and not self.is_interrupted:
            return 1  # an error is on its way that says why nothing was measured
        path, report, picture = self.config.store.path, self.folder / "report.html", self.folder / "comparison.svg"
        load = self.generator.summary() if self.generator else None
        telemetry = read_whole(path) if path.is_file() else None
        result = DemoResult(
            policy=self.config.policy.spec, seed=self.options.seed, duration_s=self.options.duration_s, trace=TRACE,
            peak_rps=self._peak_rps, cores=available_cores(), is_interrupted=self.is_interrupted,
            **(figures_of_load(load) if load else {}),
            **(figures_of_telemetry(telemetry, report) if telemetry else {}),
            **(figures_of_comparison(self._comparison, picture) if self._comparison else {}),
        )  # fmt: skip
        if self._comparison is not None:
            write_picture(self._comparison, picture)
        if telemetry is not None:
            write_report(telemetry, report, load, f"FASER demo: {self.options.duration_s:g} s of {TRACE}")
        encoded = msgspec.json.encode(result)
        (self.folder / "result.json").write_bytes(msgspec.json.format(encoded) + b"\n")
        if self.options.json:
            sys.stdout.write(encoded.decode() + "\n")
            sys.stdout.flush()
        else:
            console = Console(highlight=False)
            console.print(final_table(result, load, telemetry.summary if telemetry else None))
            if self._comparison is not None:
                console.print(self._comparison.line(), soft_wrap=True)
                self.say(f"picture {picture}")
            self.say(f"report {result.report_path}, telemetry {result.telemetry_path}")
        if self._failure is not None:
            raise self._failure
        return 130 if self.is_interrupted else int(result.requests.failed > 0)

    def _start(self, processes: ExitStack) -> tuple[RunningEngine, ProcessTree]:
        with progress_bar(self._console) as show:
            launch = self._launch(show)
            self.say(f"starting the sidecar, policy {self.config.policy.spec}")
            with deferred_interrupts():
                sidecar = processes.enter_context(own_sidecar(self.config, self.folder / "sidecar.log"))
                self._running = "engine and sidecar"
            self.say(f"starting vLLM on {launch.url}")
            with deferred_interrupts():
                engine = processes.enter_context(RunningEngine(launch, self.folder / "engine.log"))
            waited_s = engine.wait_ready(progress=show)
        self.say(f"vLLM is ready after {waited_s:.1f} s")
        await_introduction(self.config, sidecar, _INTRODUCTION_S, f"see {self.folder}/engine.log, or run: faser doctor")
        if self.options.splits and not any(each.split for each in ask(self.config.link).engines):
            self.say(f"splits {self.options.splits} cannot be had, see {self.folder}/engine.log; serving unsplit")
        return engine, sidecar

    def _served_plainly(self, processes: ExitStack, steered: LoadGenerator) -> SideBySide:
        with progress_bar(self._console) as show:
            launch = plain_launch(embedded_launch(ensure_embedded_pair(show), "", arguments=_ENGINE_ARGUMENTS))
            self.say("starting vLLM without speculation, to compare")
            with deferred_interrupts():
                engine = processes.enter_context(RunningEngine(launch, self.folder / "plain-engine.log"))
                self._running = "vLLM without speculation"
            engine.wait_ready(progress=show)
        until_s = compared_until_s(self.options.duration_s)
        plain = asyncio.run(self._plain_load(engine, until_s))
        if self.is_interrupted:
            raise KeyboardInterrupt
        engine.require_running()
        return SideBySide.of(steered.results, plain, until_s, "; ".join(self._disturbed))

    async def _plain_load(self, engine: RunningEngine, until_s: float) -> Sequence[RequestResult]:
        stop = self._stop_on_signals()
        options = LoadOptions(engine.launch.url, _served_name(engine.launch), seed=self.options.seed)
        await _answered([_WARM_UP], options, stop)
        self.say(f"the requests of the load's first {until_s:g} s, without speculation")
        most_s = MOST_PLAIN * until_s + _PLAIN_DRAIN_S
        bystanders = Bystanders(lambda: time.process_time() + engine.tree.cpu_s())
        found = await serve_plainly(self._requests, options, until_s, most_s, stop)
        self._note(bystanders.reason())
        return found

    def _note(self, disturbed: str) -> None:
        if disturbed:
            self._disturbed.append(disturbed)

    def _stop_on_signals(self) -> asyncio.Event:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt, stop)
        return stop

    def _launch(self, show: ShowProgress) -> EngineLaunch:
        pair = ensure_embedded_pair(show)
        arguments = _ENGINE_ARGUMENTS
        if self.options.method == "ngram":
            arguments += _speculative({"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2})
        elif self.options.drafter is not None:
            folder = str(Path(self.options.drafter).expanduser().absolute())
            arguments += _speculative({"method": self.options.method or "eagle3", "model": folder})
        endpoint, splits = self.config.link.endpoint, self.options.splits
        return embedded_launch(pair, endpoint, arguments=arguments, splits=splits)

    async def _load(self, engine: RunningEngine, sidecar: ProcessTree) -> None:
        stop = self._stop_on_signals()
        options = LoadOptions(engine.launch.url, _served_name(engine.launch), seed=self.options.seed)
        await _answered([_WARM_UP], options, stop)
        peak = f"{PEAK_OVER_SERVED:g} times what this machine serves"
        trial: Sequence[RequestResult] = ()
        if self.options.peak_rps is None or self.options.has_classes:
            trial = await _answered(trial_requests(), options, stop)
            if stop.is_set():
                return
        if self.options.peak_rps is None:
            self._peak_rps = peak_rps(trial, self.options.duration_s)
        else:
            self._peak_rps, peak = self.options.peak_rps, "as asked"
        self._requests = requests = self._made_requests(trial)
        self.say(
            f"{len(requests)} requests in {self.options.duration_s:g} s from {TRACE}, seed {self.options.seed}, "
            f"peak {self._peak_rps:g}/s, {peak}"
        )
        self.generator = LoadGenerator(requests, options)
        is_live = self._console.is_terminal and not self.options.json
        aside = [
            asyncio.create_task(View(self.generator, self.config.link, self._console, is_live).follow()),
            asyncio.create_task(self._watch_processes(engine, sidecar, stop)),
        ]
        bystanders = Bystanders(lambda: time.process_time() + engine.tree.cpu_s() + sidecar.cpu_s())
        try:
            with WaitingMeter(engine.pid) as meter:
                await self.generator.run(stop)
            self._note(bystanders.reason())
        finally:
            for task in aside:
                task.cancel()
            await asyncio.gather(*aside, return_exceptions=True)
        save_waiting(meter.read(), self.config.store.path)  # for `faser fidelity`

    def _made_requests(self, trial: Sequence[RequestResult]) -> Sequence[TimedRequest]:
        requests = make_requests(self.options.duration_s, self.options.seed, self._peak_rps)
        if not self.options.has_classes:
            return requests
        token = token_ms(trial)
        told = ", ".join(f"{name} {pace * token:.0f}" for name, pace in PACES.items())
        self.say(f"{self.options.interactive_share:.0%} of the requests interactive; objectives, ms a token: {told}")
        return with_classes(requests, self.options.interactive_share, token)

    def _interrupt(self, stop: asyncio.Event) -> None:
        self.is_interrupted = True
        stop.set()

    async def _watch_processes(self, engine: RunningEngine, sidecar: ProcessTree, stop: asyncio.Event) -> None:
        """End the load if the engine is gone; say once if the sidecar is, since the engine goes on without it."""
        is_steered = True
        while engine.is_running():
            if is_steered and (code := sidecar.poll()) is not None:
                is_steered = False
                self.say(f"the sidecar ended with code {code}; the engine goes on with its default lengths")
            await asyncio.sleep(_LOOK_S)
        stop.set()


async def _answered(
    requests: Sequence[TimedRequest], options: LoadOptions, stop: asyncio.Event
) -> Sequence[RequestResult]:
    """Send requests that are no part of the load; raise EngineError if one fails."""
    generator = LoadGenerator(requests, options)
    summary = await generator.run(stop)
    if summary.failed:
        raise EngineError(f"vLLM's first answer failed: {next(iter(summary.failures))}")
    return generator.results


def _served_name(launch: EngineLaunch) -> str:
    """Return the name under which the engine serves its model."""
    arguments = launch.arguments
    if "--served-model-name" in arguments:
        return arguments[arguments.index("--served-model-name") + 1]
    return launch.model


def _speculative(settings: dict[str, object]) -> tuple[str, ...]:
    return ("--speculative-config", json.dumps({**settings, "num_speculative_tokens": EMBEDDED_K_MAX}))
