"""`faser demo --stages N`: a pipeline whose stages move while it serves, every token held to what one rank says.

Called by the CLI. First plain vLLM on one rank answers the prompts; then the same model on N ranks serves clients that
ask them again and again, while a real sidecar moves its layers. It ends what it started, whatever happens.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import msgspec
from rich.console import Console

from ...models.embedded.pair import TARGET_NAME, ensure_embedded_target
from ..config import Config
from ..engine.launch import EngineLaunch, free_port, is_cpu_build, require_supported_vllm
from ..engine.processes import ProcessTree, deferred_interrupts
from ..engine.running import RunningEngine
from ..engine.serve import EMBEDDED_ARGUMENTS
from ..engine.sidecar_child import await_introduction, own_sidecar
from ..errors import EngineError, FaserError, UnsupportedError
from ..link.ask import ask
from ..progress import progress_bar
from .lifecycle import run_to_its_end
from .options import DemoOptions
from .stage_load import StageClients, Tokens, chosen_prompts
from .stage_result import StagesResult, Timeline, write_stages_picture

POLICY: Final = "off+stages:turns:100"
_LOOK_S: Final = 5.0
_INTRODUCTION_S: Final = 20.0


def run_stages_demo(options: DemoOptions) -> int:
    """Run the demo; return 0, 1 if a token was wrong or a request failed, 130 after Ctrl-C."""
    require_supported_vllm()
    if not is_cpu_build():
        raise UnsupportedError("--stages with a vLLM for GPUs", "vLLM's CPU build: stages move there only so far")
    options = replace(options, policy=options.policy or POLICY)
    return run_to_its_end(options, lambda config: StagesDemo(options, config))


class StagesDemo:
    """One run: one rank's answers, then a pipeline, a sidecar and clients."""

    def __init__(self, options: DemoOptions, config: Config) -> None:
        self.options, self.config, self.ranks = options, config, options.stages
        self.folder = config.store.path.parent
        self.clients: StageClients | None = None
        self.is_interrupted = False
        self._console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """Tell the user what happens now."""
        self._console.print(f"faser: {text}", soft_wrap=True)

    def run(self, processes: ExitStack) -> None:
        """Record one rank's answers, then serve in `processes`; remember Ctrl-C for the end."""
        try:
            prompts = chosen_prompts()
            expected = self._one_ranks(prompts)
            engine, sidecar = self._start(processes)
            self.clients = StageClients(engine.launch.url, TARGET_NAME, prompts, expected)
            asyncio.run(self._load(engine, sidecar, self.clients))
            engine.require_running()
        except KeyboardInterrupt:
            self.is_interrupted = True

    def conclude(self) -> int:
        """Print lines or JSON, write result and picture."""
        clients, path = self.clients, self.config.store.path
        if clients is None or not path.is_file():
            return 130 if self.is_interrupted else 1
        timeline, picture = Timeline.read(path), self.folder / "stages.svg"
        result = StagesResult(
            ranks=self.ranks, policy=self.config.policy.spec, duration_s=self.options.duration_s,
            answers=len(clients.answers), tokens=sum(each.tokens for each in clients.answers),
            wrong_tokens=sum(each.wrong for each in clients.answers), moves=timeline.moves,
            tokens_per_s=timeline.tokens_per_s(), failed=len(clients.failures), is_interrupted=self.is_interrupted,
            telemetry_path=str(path), picture_path=str(picture),
        )  # fmt: skip
        write_stages_picture(timeline, clients.answers, picture)
        encoded = msgspec.json.encode(result)
        (self.folder / "result.json").write_bytes(msgspec.json.format(encoded) + b"\n")
        if self.options.json:
            sys.stdout.write(encoded.decode() + "\n")
            sys.stdout.flush()
        else:
            for line in result.lines():
                self._console.print(line, soft_wrap=True)
        for failure in clients.failures[:1]:
            self.say(f"{len(clients.failures)} clients gave up, the first one: {failure}")
        self.say(f"picture {picture}, telemetry {path}")
        if self.is_interrupted:
            return 130
        return int(result.wrong_tokens > 0 or result.failed > 0)

    def _one_ranks(self, prompts: list[str]) -> list[Tokens]:
        self.say(f"one rank of plain vLLM answers {len(prompts)} prompts, to which every token is then held")
        launch = pipeline_launch(1, "")
        with ExitStack() as alone, progress_bar(self._console) as show:
            with deferred_interrupts():
                engine = alone.enter_context(RunningEngine(launch, self.folder / "one-rank-engine.log"))
            engine.wait_ready(progress=show)
            return asyncio.run(StageClients(launch.url, TARGET_NAME, prompts).record())

    def _start(self, processes: ExitStack) -> tuple[RunningEngine, ProcessTree]:
        launch = pipeline_launch(self.ranks, self.config.link.endpoint)
        with progress_bar(self._console) as show:
            self.say(f"starting the sidecar, policy {self.config.policy.spec}, and vLLM on {self.ranks} ranks")
            with deferred_interrupts():
                sidecar = processes.enter_context(own_sidecar(self.config, self.folder / "sidecar.log"))
                engine = processes.enter_context(RunningEngine(launch, self.folder / "engine.log"))
            engine.wait_ready(progress=show)
        await_introduction(self.config, sidecar, _INTRODUCTION_S, f"see {self.folder}/engine.log, or run: faser doctor")
        if not any(each.stages for each in ask(self.config.link).engines):
            raise EngineError("the engine's stages cannot move", "stages that can", f"see {self.folder}/engine.log")
        return engine, sidecar

    async def _load(self, engine: RunningEngine, sidecar: ProcessTree, clients: StageClients) -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt, stop)
        self.say(f"{self.options.duration_s:g} s of load on {clients.url}")
        follower = asyncio.create_task(self._follow(engine, sidecar, clients, stop))
        try:
            await clients.serve(self.options.duration_s, stop)
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)

    def _interrupt(self, stop: asyncio.Event) -> None:
        self.is_interrupted = True
        stop.set()

    async def _follow(
        self, engine: RunningEngine, sidecar: ProcessTree, clients: StageClients, stop: asyncio.Event
    ) -> None:
        """Say now and then where the stages are; end the load if the engine is gone."""
        is_told = False
        while engine.is_running():
            await asyncio.sleep(_LOOK_S)
            if sidecar.poll() is not None and not is_told:
                is_told = True
                self.say("the sidecar ended; the stages stay where they are")
            self.say(self._standing(clients))
        stop.set()

    def _standing(self, clients: StageClients) -> str:
        try:
            stages = next((each.stages.told() for each in ask(self.config.link).engines if each.stages), "no stages")
        except FaserError:
            stages = "no sidecar"
        answers, wrong = len(clients.answers), sum(each.wrong for each in clients.answers)
        return f"{time.monotonic() - clients.began_s:4.0f} s: {stages}; {answers} answers, {wrong} wrong tokens"


def pipeline_launch(ranks: int, endpoint: str) -> EngineLaunch:
    """Return the launch of the embedded target in float32, whose greedy tokens do not depend on the batch."""
    arguments = [*EMBEDDED_ARGUMENTS, "--dtype", "float32", "--max-num-batched-tokens", "512"]
    if ranks > 1:
        arguments += ["--pipeline-parallel-size", str(ranks), "--distributed-executor-backend", "mp"]
    return EngineLaunch(
        model=str(ensure_embedded_target()), port=free_port(), arguments=tuple(arguments), endpoint=endpoint,
        has_faser=ranks > 1, kv_cache_gib=1, ranks=ranks,
        environment_extra={"FASER_STAGES": "1"} if ranks > 1 else {"VLLM_PLUGINS": "none"},
    )  # fmt: skip
