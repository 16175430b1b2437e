"""`faser demo --tour`: the same prompts with each mechanism forced on in turn, every token held to no speculation.

Called by the CLI. First plain vLLM answers without speculation; then engines whose gates are held open answer the
same, while one sidecar is told, as an operator tells it, to force another mechanism. It ends what it started, whatever
happens.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import aiohttp
import msgspec
from rich.console import Console

from ....models.embedded.pair import EMBEDDED_K_MAX, TARGET_NAME, EmbeddedPair, ensure_embedded_pair
from ...config import Config
from ...engine.launch import EngineLaunch, is_cpu_build, require_supported_vllm
from ...engine.processes import ProcessTree, deferred_interrupts
from ...engine.running import RunningEngine
from ...engine.sidecar_child import change_policy, own_sidecar
from ...errors import EngineError, FaserError, UnsupportedError
from ...link.ask import ask
from ...progress import progress_bar
from ..comparison import Bystanders
from ..lifecycle import run_to_its_end
from ..options import DemoOptions
from ..stage_load import StageClients, Tokens, chosen_prompts, wrong_tokens
from .plan import STATIONS, Station, engines_of, reference_launch, refusal, tour_launch
from .station_steps import StationSteps, read_station
from .tour_picture import write_tour_picture
from .tour_result import StationResult, TourResult, over

WARM_UP: Final = f"fixed:{EMBEDDED_K_MAX}"  # no station's policy: its steps are nobody's
EVERY_PROMPT: Final = 3  # ... of as many: six, which are answered side by side
_INTRODUCTION_S: Final = 60.0
_WRITTEN_S: Final = 0.1


def run_tour(options: DemoOptions, stations: Sequence[Station] = STATIONS, prompts: Sequence[str] | None = None) -> int:
    """Run the tour; return 0, 1 if a token was wrong or a mechanism did nothing, 130 after Ctrl-C.

    :param prompts: None: six of all kinds
    """
    require_supported_vllm()
    if not is_cpu_build():
        raise UnsupportedError("--tour with a vLLM for GPUs", "vLLM's CPU build: copies and overlap are its alone")
    chosen = chosen_prompts()[::EVERY_PROMPT] if prompts is None else prompts
    return run_to_its_end(options, lambda config: Tour(options, unguarded(config), stations, chosen))


def unguarded(config: Config) -> Config:
    """Return the configuration with which a sidecar warms engines up, and steers on where that loses."""
    guard = replace(config.guard, envelope_margin=1.0)
    return replace(config, policy=replace(config.policy, spec=WARM_UP), guard=guard)


def told_settings(launch: EngineLaunch) -> str:
    """Return the settings with which a reader starts the same engine."""
    found = {key: value for key, value in launch.environment_extra.items() if key.startswith("FASER")}
    return " ".join(f"{key}={os.path.basename(value)}" for key, value in found.items())


@dataclass(frozen=True, slots=True)
class StationAnswers:
    """All prompts, as often as there was time for: what was said, and how fast."""

    answers: list[Tokens]
    tokens_per_s: float  # of the rounds that other work disturbed least
    disturbed: str = ""  # by what, in these rounds too

    def wrong(self, expected: Sequence[Tokens]) -> int:
        """Count the tokens that differ from these answers, one for each prompt, round by round."""
        return sum(wrong_tokens(said, expected[at % len(expected)]) for at, said in enumerate(self.answers))


class Tour:
    """One run: answers without speculation, then an engine after the other, at each of them its stations."""

    def __init__(
        self, options: DemoOptions, config: Config, stations: Sequence[Station], prompts: Sequence[str]
    ) -> None:
        self.options, self.config, self.stations, self.prompts = options, config, stations, prompts
        self.folder = config.store.path.parent
        self.cores = sorted(os.sched_getaffinity(0))
        self.results: dict[str, StationResult] = {}
        self.is_interrupted = False
        self._reference: StationAnswers | None = None
        self._boots: dict[str, str] = {}  # by engine: its boot id
        self._began_s = time.monotonic()
        self._trees: list[ProcessTree] = []  # beside the engine's
        self._console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """Tell the user what happens now."""
        self._console.print(f"faser: {time.monotonic() - self._began_s:4.0f} s: {text}", soft_wrap=True, markup=False)

    def run(self, processes: ExitStack) -> None:
        """Serve every station; remember Ctrl-C for the end."""
        try:
            with progress_bar(self._console) as show:
                pair = ensure_embedded_pair(show)
            self._reference = self._without_speculation(pair)
            for station in self.stations:
                if reason := refusal(station, len(self.cores)):
                    self._note(station, refused=reason)
            self._visit([each for each in self.stations if each.name not in self.results], pair, processes)
        except KeyboardInterrupt:
            self.is_interrupted = True

    def conclude(self) -> int:
        """Print table or JSON, write result and picture."""
        path, picture = self.config.store.path, self.folder / "tour.svg"
        if self._reference is None or not path.is_file():
            return 130 if self.is_interrupted else 1
        steps = {station.name: self._steps_of(station) for station in self.stations if station.name in self.results}
        result = TourResult(
            prompts=len(self.prompts), tokens=sum(map(len, self._reference.answers[: len(self.prompts)])),
            plain_tokens_per_s=self._reference.tokens_per_s,
            stations=[self.results[name].with_steps(found.figures()) for name, found in steps.items()],
            disturbed=self._reference.disturbed, wall_s=round(time.monotonic() - self._began_s, 1),
            cores=len(self.cores), is_interrupted=self.is_interrupted, telemetry_path=str(path),
            picture_path=str(picture),
        ).against_their_drafts()  # fmt: skip
        shown = {name: (self.results[name].mechanisms, found) for name, found in steps.items() if len(found)}
        write_tour_picture(shown, picture)
        self._print(result)
        return result.exit_code

    def _print(self, result: TourResult) -> None:
        encoded = msgspec.json.encode(result)
        (self.folder / "result.json").write_bytes(msgspec.json.format(encoded) + b"\n")
        for each in result.stations:
            self._console.print(each.line(), soft_wrap=True, markup=False)
        if self.options.json:
            sys.stdout.write(encoded.decode() + "\n")
            sys.stdout.flush()
        else:
            Console(highlight=False).print(result.table())
        for line in result.closing_lines():
            self.say(line)
        self.say(f"picture {result.picture_path}, telemetry {result.telemetry_path}")

    def _steps_of(self, station: Station) -> StationSteps:
        boot = self._boots.get(station.engine)
        return StationSteps.of([]) if boot is None else read_station(self.config.store.path, boot, station.policy)

    def _without_speculation(self, pair: EmbeddedPair) -> StationAnswers:
        self.say(f"plain vLLM answers {len(self.prompts)} prompts without speculation; every token is held to it")
        with ExitStack() as alone:
            launch = reference_launch(pair, self.cores)
            engine = self._engine(launch, "plain-engine.log", alone)
            self._serve(launch, 0.0)  # warms up
            served = self._undisturbed(engine, launch)
        self.say(f"no speculation: {served.tokens_per_s:.0f} tokens/s")
        return served

    def _visit(self, stations: Sequence[Station], pair: EmbeddedPair, processes: ExitStack) -> None:
        policy_file = self.folder / "policy.toml"
        with deferred_interrupts():
            log = self.folder / "sidecar.log"
            sidecar = processes.enter_context(own_sidecar(self.config, log, policy_file))
            self._trees.append(sidecar)
        for number, name in enumerate(engines_of(stations), start=1):
            with ExitStack() as alone:
                launch = tour_launch(name, pair, self.config.link.endpoint, self.cores)
                self.say(f"starting vLLM, {name}, {told_settings(launch)}")
                engine = self._engine(launch, f"engine-{number}.log", alone)
                self._boots[name] = self._introduced(sidecar, engine)
                change_policy(sidecar, self.config.link, policy_file, WARM_UP)
                self._serve(launch, 0.0)
                for station in (each for each in stations if each.engine == name):
                    change_policy(sidecar, self.config.link, policy_file, station.policy)
                    self._show(station, engine, launch)

    def _engine(self, launch: EngineLaunch, log: str, owner: ExitStack) -> RunningEngine:
        with progress_bar(self._console) as show:
            with deferred_interrupts():
                engine = owner.enter_context(RunningEngine(launch, self.folder / log))
            engine.wait_ready(progress=show)
        return engine

    def _introduced(self, sidecar: ProcessTree, engine: RunningEngine) -> str:
        """Return the boot id under which a new engine introduced itself; raise EngineError if none does."""
        known, end_s = set(self._boots.values()), time.monotonic() + _INTRODUCTION_S
        while time.monotonic() < end_s:
            engine.require_running()
            if (code := sidecar.poll()) is not None:
                raise EngineError(f"the sidecar ended with code {code}", remedy=f"see {sidecar.log}")
            try:
                if found := [each.boot_id for each in ask(self.config.link).engines if each.boot_id not in known]:
                    return found[0]
            except FaserError:  # it is not there yet
                pass
            time.sleep(_WRITTEN_S)
        raise EngineError(f"vLLM did not introduce itself within {_INTRODUCTION_S:g} s", remedy=f"see {engine.log}")

    def _show(self, station: Station, engine: RunningEngine, launch: EngineLaunch) -> None:
        assert self._reference is not None
        self.say(f"{station.name}: {station.note}")
        try:
            served = self._undisturbed(engine, launch)
        except (EngineError, TimeoutError, aiohttp.ClientError) as error:
            engine.require_running()
            self._note(station, failed=f"{type(error).__name__}: {error}"[:200])
            return
        wrong = served.wrong(self._reference.answers[: len(self.prompts)])
        times = self._note(station, served, wrong).over_none
        self.say(f"{station.name}: {served.tokens_per_s:.0f} tokens/s, {times} of no speculation; {wrong} wrong tokens")

    def _note(
        self,
        station: Station,
        served: StationAnswers | None = None,
        wrong: int = 0,
        refused: str = "",
        failed: str = "",
    ) -> StationResult:
        plain = None if self._reference is None else self._reference.tokens_per_s
        rate = None if served is None else served.tokens_per_s
        result = self.results[station.name] = StationResult(
            name=station.name, engine=station.engine, mechanisms=station.mechanisms, policy=station.policy,
            note=station.note, refused=refused, failed=failed, wrong_tokens=wrong, tokens_per_s=rate,
            tokens=0 if served is None else sum(map(len, served.answers)), over_none=over(rate, plain),
            beside=station.beside, disturbed="" if served is None else served.disturbed,
        )  # fmt: skip
        return result

    def _undisturbed(self, engine: RunningEngine, launch: EngineLaunch) -> StationAnswers:
        """Serve the prompts for a station's share of the time; once more where other work disturbed that."""
        first = self._watched(engine, launch)
        if not first.disturbed:
            return first
        second = self._watched(engine, launch)
        counts = second if not second.disturbed or second.tokens_per_s > first.tokens_per_s else first
        return replace(counts, answers=[*first.answers, *second.answers])

    def _watched(self, engine: RunningEngine, launch: EngineLaunch) -> StationAnswers:
        trees = (engine.tree, *self._trees)
        bystanders = Bystanders(lambda: time.process_time() + sum(tree.cpu_s() for tree in trees))
        served = self._serve(launch, self.options.duration_s / (len(self.stations) + 1))
        return replace(served, disturbed=bystanders.reason())

    def _serve(self, launch: EngineLaunch, least_s: float) -> StationAnswers:
        """Ask all prompts at once, again while there is time."""
        clients, began_s = StageClients(launch.url, TARGET_NAME, self.prompts), time.monotonic()
        answers: list[Tokens] = []
        while not answers or time.monotonic() - began_s < least_s:
            answers += asyncio.run(clients.record())
        return StationAnswers(answers, round(sum(map(len, answers)) / (time.monotonic() - began_s), 2))
