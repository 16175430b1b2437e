"""The engine of stages.py, in a process of its own; its ranks are processes of their own.

Started by stages.py with the number of ranks. One rank is vLLM without FASER.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import psutil
from remote import serve

from faser.controller.demo.stage_load import chosen_prompts
from faser.controller.engine.machine import Noise, Processor, available_cores
from faser.models.embedded.pair import ensure_embedded_target

FASER: Final = {
    "scheduler_cls": "faser.engine_adapter.scheduler.FaserScheduler",
    "worker_cls": "faser.engine_adapter.worker.FaserWorker",
    "distributed_executor_backend": "mp",
}
CALM_STEPS: Final = 24  # between a switch and the next order
MAX_MODEL_LEN: Final = 512
MOVED_TOKENS: Final = 256  # of an answer while stages move: longer ones' steps get slower and slower


class Order:
    """Wants one cut."""

    def __init__(self, cut: Sequence[int]) -> None:
        self._cut = tuple(cut)

    def wanted(self) -> tuple[int, ...]:
        """Return it."""
        return self._cut


class Turns:
    """Wants one cut after the other, each for some steps behind its switch."""

    def __init__(self, cuts: Sequence[Sequence[int]], plan: Any) -> None:
        self._cuts, self._plan, self._turn, self._calm = [tuple(cut) for cut in cuts], plan, 0, 0

    def wanted(self) -> tuple[int, ...]:
        """Return the one whose turn it is."""
        there = self._plan.move is None and self._plan.cut.bounds == self._cuts[self._turn]
        self._calm = self._calm + 1 if there else 0
        if self._calm > CALM_STEPS:
            self._turn, self._calm = (self._turn + 1) % len(self._cuts), 0
        return self._cuts[self._turn]


class StepClock:
    """Times each step of an engine from output to output, and keeps what it did about stages."""

    def __init__(self, scheduler: Any) -> None:
        self.steps: list[tuple[float, tuple[int, ...], bool, bool]] = []  # ms, bounds, is_moving, is_switch
        self._before_s: float | None = None
        self._plan = scheduler.stages.plan
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        scheduler.schedule, scheduler.update_from_output = self._marked, self._timed

    def _marked(self, *args: Any, **kwargs: Any) -> Any:
        scheduled = self._schedule(*args, **kwargs)
        scheduled.is_under_way = self._plan.move is not None
        return scheduled

    def _timed(self, scheduled: Any, *args: Any) -> Any:
        now_s, order = time.perf_counter(), getattr(scheduled, "faser_stages", None)
        if order is None:
            self._before_s = None
        else:
            if self._before_s is not None:
                ms = 1e3 * (now_s - self._before_s)
                self.steps.append((ms, order.bounds, scheduled.is_under_way, order.is_switch))
            self._before_s = now_s
        return self._update(scheduled, *args)

    def pause(self) -> None:
        """Do not take the next output for one that followed the last."""
        self._before_s = None


class Watch:
    """What other processes used of the machine meanwhile."""

    def __init__(self) -> None:
        self._began_s, self._processor, self._own_s = time.monotonic(), Processor.now(), _own_s()

    def noise(self) -> dict[str, float]:
        """Return cores used by others, and the share of time that the host kept."""
        seconds = time.monotonic() - self._began_s
        noise = Noise.between(self._processor, Processor.now(), _own_s() - self._own_s, seconds, available_cores())
        return {"other_cores": round(noise.other_cpu, 3), "stolen": round(noise.steal_share, 4)}


def _own_s() -> float:
    mine = psutil.Process()
    return float(sum(sum(process.cpu_times()[:2]) for process in [mine, *mine.children(recursive=True)]))


class StagesEngine:
    """Answers `throughput` and `moves`."""

    def __init__(self, ranks: int) -> None:
        from vllm import LLM

        self._llm = LLM(
            str(ensure_embedded_target()), dtype="float32", enforce_eager=True, max_num_seqs=16, seed=0,
            max_model_len=MAX_MODEL_LEN, enable_prefix_caching=False, pipeline_parallel_size=ranks,
            **(FASER if ranks > 1 else {}),
        )  # fmt: skip
        self._engine, self._ranks = self._llm.llm_engine, ranks
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._prompts = [self._llm.get_tokenizer().encode(text) for text in chosen_prompts()]
        self._sent = 0

    def throughput(self, cuts: dict[str, list[int] | None], loads: list[int], tokens: int) -> dict[str, Any]:
        """Return tokens per second by cut and load, and what was said."""
        watch, rates, answers = Watch(), {}, {}
        for name, cut in cuts.items():
            self._move(cut)
            rates[name] = {}
            for load in loads:
                started_s = time.perf_counter()
                said = self._answer(load, tokens)
                rates[name][str(load)] = load * tokens / (time.perf_counter() - started_s)
                answers[f"{name}, {load}"] = hashlib.sha256(repr(said).encode()).hexdigest()[:12]
        return {"tokens_per_s": rates, "answers": answers, "throughput": watch.noise()}

    def _move(self, cut: list[int] | None) -> None:
        """Be cut like this, and warm."""
        if cut is not None:
            self._scheduler.stages.orders = Order(cut)
        self._answer(2, 48)
        if cut is not None and self._scheduler.stages.plan.cut.bounds != tuple(cut):
            raise RuntimeError(f"bounds {self._scheduler.stages.plan.cut.bounds}; expected {cut}")

    def _answer(self, load: int, tokens: int) -> list[list[int]]:
        """Return what so many clients were told that ask for one answer each."""
        said: dict[int, list[int]] = {}
        self._send_groups(load, tokens)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    said[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
        return [said[number] for number in sorted(said)]

    def _send_groups(self, requests: int, tokens: int) -> None:
        """Send as many groups as there are ranks, a step apart.

        vLLM makes a batch of what waits, and keeps as many batches in flight as there are ranks: what comes at once
        stays in one batch, and all ranks but one are idle.
        """
        each = -(-requests // self._ranks)
        for first in range(0, requests, each):
            for number in range(first, min(first + each, requests)):
                self._send(number, tokens)
            self._engine.step()

    def _send(self, number: int, tokens: int) -> None:
        from vllm import SamplingParams

        self._sent += 1
        limits = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompt = self._prompts[number % len(self._prompts)]
        self._engine.add_request(f"{number}-{self._sent}", {"prompt_token_ids": prompt}, limits)

    def moves(self, cuts: list[list[int]], requests: int, moves: int) -> dict[str, Any]:
        """Return the steps of requests that decode while stages move so many times."""
        plan, clock, watch = self._scheduler.stages.plan, StepClock(self._scheduler), Watch()
        self._scheduler.stages.orders = Turns(cuts, plan)
        done = plan.counts.moves + moves
        while plan.counts.moves < done:
            clock.pause()
            self._send_groups(requests, MOVED_TOKENS)
            while self._engine.has_unfinished_requests() and plan.counts.moves < done:
                self._engine.step()
        for _ in range(CALM_STEPS):
            self._engine.step()
        return {"steps": clock.steps, "most_tail_blocks": plan.counts.most_tail_blocks} | watch.noise()


if __name__ == "__main__":
    ranks = int(sys.argv[2])
    if ranks == 1:
        os.environ["VLLM_PLUGINS"] = "none"
    serve(StagesEngine(ranks))
