"""`faser demo`: the embedded model on a real vLLM, steered by a real sidecar, under a replayed production load.

Called by the CLI. It owns every process it starts and ends them whatever happens; what was measured until then is
printed and stays readable.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from ...env.workload.workload import TimedRequest
from ...models.embedded.pair import EMBEDDED_K_MAX, ensure_embedded_pair
from ..calibrate.starvation import WaitingMeter, save_waiting
from ..config import Config
from ..config_layers import load
from ..decision.session import check_policy
from ..engine.launch import EngineLaunch, available_cores, require_supported_vllm
from ..engine.load_generator import LoadGenerator, LoadOptions
from ..engine.load_summary import RequestResult
from ..engine.processes import ProcessTree, deferred_interrupts, ignored_interrupts, stopping_on_sigterm
from ..engine.running import RunningEngine
from ..engine.serve import embedded_launch
from ..engine.sidecar_child import await_introduction, own_sidecar
from ..errors import EngineError, StoreError, UsageError
from ..link.ask import ask
from ..link.endpoint import socket_folder
from ..progress import ShowProgress, progress_bar
from ..reports.run_report import write_report
from ..telemetry.telemetry_file import read_whole
from .load import PEAK_OVER_SERVED, TRACE, make_requests, peak_rps, trial_requests
from .result import DemoResult, figures_of_load, figures_of_telemetry, final_table
from .view import View

METHODS: Final = ("eagle3", "eagle", "draft_model", "ngram")
# A prompt's chunk holds every other request up: 0.4 s of prefill instead of the 1.5 s of vLLM's default.
_ENGINE_ARGUMENTS: Final[tuple[str, ...]] = ("--max-num-batched-tokens", "512")
_WARM_UP: Final = TimedRequest(0.0, "Count from one to twenty.", "chat", 24)
_INTRODUCTION_S: Final = 20.0
_LOOK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `faser demo` was asked for; None means the default."""

    duration_s: float = 60.0
    policy: str | None = None
    seed: int = 0
    peak_rps: float | None = None
    json: bool = False
    method: str | None = None
    drafter: str | None = None
    splits: str = ""
    output: Path | None = None
    config: Path | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.duration_s) and 1.0 <= self.duration_s <= 1200.0):
            raise UsageError(f"--duration {self.duration_s:g}", "1 to 1200 seconds")
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}", "0 or more")
        if self.peak_rps is not None and not 0.1 <= self.peak_rps <= 1000.0:
            raise UsageError(f"--peak-rps {self.peak_rps:g}", "0.1 to 1000 requests per second")
        if self.method is not None and self.method not in METHODS:
            raise UsageError(f"--method {self.method}", " or ".join(METHODS))
        if self.method == "ngram" and self.drafter is not None:
            raise UsageError("--drafter with --method ngram", "none: ngram looks drafts up in the text")
        if self.method in ("draft_model", "eagle") and self.drafter is None:
            raise UsageError(f"--method {self.method} without a drafter", "a folder", "pass --drafter FOLDER")
        if self.drafter is not None and not Path(self.drafter).expanduser().is_dir():
            raise UsageError(f"--drafter {self.drafter}", "a folder with a model that vLLM loads")


def run_demo(options: DemoOptions) -> int:
    """Run the demo; return 0, 1 if a request failed, 130 after Ctrl-C."""
    require_supported_vllm()
    if options.peak_rps is not None:  # one that the trace does not have is told before anything starts
        make_requests(options.duration_s, options.seed, options.peak_rps)
    with socket_folder("demo") as sockets, stopping_on_sigterm():
        demo = Demo(options, _configure(options, sockets))
        processes = ExitStack()
        try:
            demo.run(processes)
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
        self._has_started = False
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

    def stop(self, processes: ExitStack) -> None:
        """End the engine, then the sidecar: its last records are in the file then."""
        if self._has_started:
            self.say("stopping engine and sidecar")
        processes.close()

    def conclude(self) -> int:
        """Print table or JSON, write report and result; raise the engine's error if it went away."""
        if self.generator is None and not self.is_interrupted:
            return 1  # an error is on its way that says why nothing was measured
        path, report = self.config.store.path, self.folder / "report.html"
        load = self.generator.summary() if self.generator else None
        telemetry = read_whole(path) if path.is_file() else None
        result = DemoResult(
            policy=self.config.policy.spec, seed=self.options.seed, duration_s=self.options.duration_s, trace=TRACE,
            peak_rps=self._peak_rps, cores=available_cores(), is_interrupted=self.is_interrupted,
            **(figures_of_load(load) if load else {}),
            **(figures_of_telemetry(telemetry, report) if telemetry else {}),
        )  # fmt: skip
        if telemetry is not None:
            write_report(telemetry, report, load, f"FASER demo: {self.options.duration_s:g} s of {TRACE}")
        encoded = msgspec.json.encode(result)
        (self.folder / "result.json").write_bytes(msgspec.json.format(encoded) + b"\n")
        if self.options.json:
            sys.stdout.write(encoded.decode() + "\n")
            sys.stdout.flush()
        else:
            Console(highlight=False).print(final_table(result, load, telemetry.summary if telemetry else None))
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
                self._has_started = True
            self.say(f"starting vLLM on {launch.url}")
            with deferred_interrupts():
                engine = processes.enter_context(RunningEngine(launch, self.folder / "engine.log"))
            waited_s = engine.wait_ready(progress=show)
        self.say(f"vLLM is ready after {waited_s:.1f} s")
        await_introduction(self.config, sidecar, _INTRODUCTION_S, f"see {self.folder}/engine.log, or run: faser doctor")
        if self.options.splits and not any(each.split for each in ask(self.config.link).engines):
            self.say(f"splits {self.options.splits} cannot be had, see {self.folder}/engine.log; serving unsplit")
        return engine, sidecar

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
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt, stop)
        options = LoadOptions(engine.launch.url, _served_name(engine.launch), seed=self.options.seed)
        await _answered([_WARM_UP], options, stop)
        peak = f"{PEAK_OVER_SERVED:g} times what this machine serves"
        if self.options.peak_rps is None:
            trial = await _answered(trial_requests(), options, stop)
            if stop.is_set():
                return
            self._peak_rps = peak_rps(trial, self.options.duration_s)
        else:
            self._peak_rps, peak = self.options.peak_rps, "as asked"
        requests = make_requests(self.options.duration_s, self.options.seed, self._peak_rps)
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
        try:
            with WaitingMeter(engine.pid) as meter:
                await self.generator.run(stop)
        finally:
            for task in aside:
                task.cancel()
            await asyncio.gather(*aside, return_exceptions=True)
        save_waiting(meter.read(), self.config.store.path)  # for `faser fidelity`

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


def _configure(options: DemoOptions, sockets: Path) -> Config:
    """Return the sidecar's configuration: the user's, with the demo's own socket and telemetry file."""
    folder = (options.output or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).absolute()
    telemetry = folder / "telemetry.sqlite"
    flags = {
        "link.endpoint": f"ipc://{sockets / 'engine.sock'}",
        "link.status_endpoint": f"ipc://{sockets / 'status.sock'}",
        "policy.spec": options.policy,
        "mode.state": folder / "modes.json",
        "store.enabled": True,
        "store.path": telemetry,
    }
    config = load(options.config, os.environ, flags).config
    check_policy(config.policy.spec)
    if telemetry.exists():
        raise StoreError(f"{telemetry} exists", "a new file", "remove it or pass another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} cannot be made: {error.strerror}", "a writable folder", "pass --output") from None
    return config
