"""One real vLLM engine under steady load while its real sidecar is killed, stopped and started again.

Run by test_outage.py as a process of its own: scenario as JSON on stdin, what happened as JSON in the file it names.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from faser.engine_adapter.steering.orders import StepOrder
from faser.engine_adapter.steering.steering import BatchOutcome, Steering

PATIENCE_S = 60.0
REQUESTS = 4


class Sidecar:
    """A real `faser sidecar` process.

    :param faser: what is run in place of the command `faser`.
    """

    def __init__(self, endpoint: str, folder: Path, faser: list[str] | None = None) -> None:
        faser = faser or [str(Path(sys.executable).with_name("faser"))]
        self._command = [*faser, "sidecar", "--endpoint", endpoint, "--no-record"]
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, policy: str) -> None:
        """Start it."""
        log = (self._folder / "sidecar.log").open("ab")
        self.process = subprocess.Popen([*self._command, "--policy", policy], stdout=log, stderr=log, cwd="/")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; wait for its end if that is what the signal does."""
        assert self.process is not None
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(10)


class Load:
    """Keeps REQUESTS requests running in the engine; counts what finishes and how."""

    def __init__(self, engine: Any, prompt: list[int]) -> None:
        from vllm import SamplingParams

        self.engine = engine
        self.prompt = prompt
        self.parameters = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, detokenize=False)
        self.steps: list[dict[str, Any]] = []
        self.started = 0
        self.finished: list[int] = []
        inherited = Steering.record

        def record(steering: Steering, order: StepOrder, outcome: BatchOutcome) -> None:
            self.steps.append(
                {
                    "epoch": order.lease_epoch,
                    "longest": max(order.lengths.values()),
                    "is_prefill": any(n > 7 for n in outcome.scheduled.values()),
                    "time_s": time.monotonic(),
                }
            )
            inherited(steering, order, outcome)

        Steering.record = record  # type: ignore[method-assign]

    def step(self) -> None:
        """One engine step with a full load."""
        while self.started - len(self.finished) < REQUESTS:
            self.started += 1
            self.engine.add_request(f"r{self.started}", {"prompt_token_ids": self.prompt}, self.parameters)
        began = time.perf_counter()
        for output in self.engine.step():
            if output.finished:
                self.finished.append(len(output.outputs[0].token_ids))
        if self.steps:
            self.steps[-1]["wall_s"] = time.perf_counter() - began

    def run(self, steps: int) -> list[dict[str, Any]]:
        """Run some steps; return their records."""
        first = len(self.steps)
        for _ in range(steps):
            self.step()
        return self.steps[first:]

    def run_until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, float]:
        """Run until a step fulfils the condition; return how long it took."""
        began, steps = time.monotonic(), 0
        while True:
            steps += 1
            self.step()
            if condition(self.steps[-1]):
                return {"steps": steps, "seconds": time.monotonic() - began}
            assert time.monotonic() - began < PATIENCE_S, f"no such step within {PATIENCE_S} s: {self.steps[-1]}"


def is_steered(step: dict[str, Any]) -> bool:
    return bool(step["epoch"] > 0)


def is_default(step: dict[str, Any]) -> bool:
    return step["epoch"] == 0 and step["longest"] == 0


def lease_story(load: Load, sidecar: Sidecar) -> dict[str, Any]:
    """Kill, restart, stop and continue a sidecar that asks for three tokens each."""
    story: dict[str, Any] = {}
    sidecar.start("fixed:3")
    story["first control"] = load.run_until(is_steered)
    story["steered"] = load.run(40)
    sidecar.send(signal.SIGKILL)
    story["default after kill"] = load.run_until(is_default)
    story["dead"] = load.run(40)
    sidecar.start("fixed:3")
    story["control after restart"] = load.run_until(is_steered)
    load.run(20)
    sidecar.send(signal.SIGSTOP)
    story["default after stop"] = load.run_until(is_default)
    story["stopped"] = load.run(40)
    sidecar.send(signal.SIGCONT)
    story["control after continue"] = load.run_until(is_steered)
    sidecar.send(signal.SIGTERM)
    story["default after release"] = load.run_until(is_default)
    return story


def timing_story(load: Load, sidecar: Sidecar, rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Time steps of the same work (no drafts) beside a healthy, a killed and a stopped sidecar, in turns.

    Returns seconds per step, a list for each turn; "healthy" has one before each fault. A faulty turn begins with the
    fault itself, and the steps until the lease is over are in it.
    """
    times: dict[str, list[list[float]]] = {"healthy": [], "killed": [], "stopped": []}

    def note(name: str, fault: signal.Signals | None = None) -> None:
        load.run(3)
        first = len(load.steps)
        if fault is not None:
            sidecar.send(fault)
            load.run_until(is_default)
        load.run(steps)
        times[name].append([step["wall_s"] for step in load.steps[first:] if not step["is_prefill"]])

    for _ in range(rounds):
        sidecar.start("off")
        load.run_until(is_steered)
        note("healthy")
        note("stopped", signal.SIGSTOP)
        sidecar.send(signal.SIGCONT)
        load.run_until(is_steered)
        note("healthy")
        note("killed", signal.SIGKILL)
    return times


@contextlib.contextmanager
def leashed(sidecar: Sidecar) -> Iterator[None]:
    """Leave no sidecar behind."""
    try:
        yield
    finally:
        if sidecar.process is not None and sidecar.process.poll() is None:
            os.kill(sidecar.process.pid, signal.SIGKILL)
            sidecar.process.wait(10)


def main(scenario: dict[str, Any]) -> dict[str, Any]:
    """Return both stories."""
    from vllm import LLM

    llm = LLM(
        scenario["model"],
        scheduler_cls="faser.engine_adapter.scheduler.FaserScheduler",
        worker_cls="faser.engine_adapter.worker.FaserWorker",
        **scenario["engine"],
    )
    load = Load(llm.llm_engine, llm.get_tokenizer().encode("Count: one, two, three, one, two, three, one, two,"))
    sidecar = Sidecar(scenario["endpoint"], Path(scenario["result"]).parent)
    with leashed(sidecar):
        story = lease_story(load, sidecar)
        times = timing_story(load, sidecar, scenario["rounds"], scenario["steps"])
    return {"story": story, "times": times, "finished": load.finished, "started": load.started}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    Path(given["result"]).write_text(json.dumps(main(given)))
