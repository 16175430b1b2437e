"""One real vLLM engine with a pipeline whose stages move under load; run by the tests here in a process of its own.

Reads a scenario as JSON from stdin: model, engine arguments, who orders which moves, which control breaks them. Writes
what requests said, and counts. `gauntlet.py` beside this folder and short_requests.py have the requests.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
gauntlet: Any = import_module("gauntlet")
sys.path.insert(0, str(Path(__file__).parent))
short_requests: Any = import_module("short_requests")

CLASSES = {
    "scheduler_cls": "faser.engine_adapter.scheduler.FaserScheduler",
    "worker_cls": "faser.engine_adapter.worker.FaserWorker",
}


class RandomOrders:
    """Wants other bounds at every step, or at every second one; now and then ranks without layers."""

    def __init__(self, seed: int, layers: int, ranks: int) -> None:
        self._dice, self._layers, self._ranks = random.Random(seed), layers, ranks
        self._bounds: tuple[int, ...] | None = None

    def wanted(self) -> tuple[int, ...] | None:
        """Return bounds."""
        if self._bounds is None or self._dice.random() < 0.7:
            ends = [0, self._layers] if self._dice.random() < 0.3 else range(self._layers + 1)
            self._bounds = tuple(sorted(self._dice.choice(ends) for _ in range(self._ranks - 1)))
        return self._bounds


class ListedOrders:
    """Wants one cut after the other, each for so many steps."""

    def __init__(self, cuts: list[list[int]], steps: int) -> None:
        self._cuts, self._steps, self._asked = cuts, steps, 0

    def wanted(self) -> tuple[int, ...] | None:
        """Return bounds."""
        self._asked += 1
        return tuple(self._cuts[self._asked // self._steps % len(self._cuts)])


class OneOrder:
    """Wants a cut until the move has begun, and then nothing any more, as a sidecar that died."""

    def __init__(self, cut: list[int], plan: Any) -> None:
        self._cut, self._plan, self._has_begun = tuple(cut), plan, False

    def wanted(self) -> tuple[int, ...] | None:
        """Return bounds, or None."""
        move = self._plan.move
        self._has_begun = self._has_begun or (move is not None and move.target.bounds == self._cut)
        return None if self._has_begun else self._cut


def blocks_left(control: str) -> list[int] | None:
    """Return where the block to leave behind is noted; None: all of them stay."""
    return [] if control == "stale" else None


def spoil(stages: Any, control: str) -> None:
    """Leave KV behind: every block, or a single full one."""
    if not control:
        return
    inherited, left = stages.plan.step, blocks_left(control)

    def cut(copies: Any) -> Any:
        if left is None:
            return ()
        if not left:
            left.extend([min(copy.blocks) for copy in copies][:1])
        rest = [replace(copy, blocks=tuple(b for b in copy.blocks if b not in left)) for copy in copies]
        return tuple(copy for copy in rest if copy.blocks)

    def step(*args: Any, **kwargs: Any) -> Any:
        order = inherited(*args, **kwargs)
        return replace(order, ahead=cut(order.ahead), tail=cut(order.tail))

    stages.plan.step = step


class Watched:
    """An engine whose steps are timed; `moves` counts switches before each."""

    def __init__(self, engine: Any, stages: Any, to_kill: int | None = None) -> None:
        self.times_s: list[float] = []
        self._to_kill = to_kill  # a process that dies in the middle of a move
        self.switches: list[int] = []
        self._engine, self._stages = engine, stages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        """Step, and time it."""
        started = time.perf_counter()
        outputs = self._engine.step()
        self.times_s.append(time.perf_counter() - started)
        if self._to_kill is not None and self._is_time_to_kill():
            os.kill(self._to_kill, signal.SIGKILL)
            self._to_kill = None
        self.switches.append(0 if self._stages is None else self._stages.plan.counts.moves)
        return outputs

    def _is_time_to_kill(self) -> bool:
        if self._stages is None:
            return len(self.times_s) > 20
        return self._stages.plan.move is not None


def workers() -> list[psutil.Process]:
    """Return the ranks' processes, in their order."""
    found = [child for child in psutil.Process().children() if "Worker" in " ".join(child.cmdline())]
    return sorted(found, key=lambda child: child.pid)


def memory_mib() -> list[float]:
    """Return what each rank has for itself."""
    return [child.memory_full_info().uss / (1 << 20) for child in workers()]


def drive(llm: Any, watched: Watched, requests: int, tokens: int, prefix: str) -> dict[str, list[int]]:
    """Let short requests arrive one after the other; return what each said."""
    from vllm import SamplingParams

    said, todo, step = {}, list(range(requests)), 0
    while todo or watched.has_unfinished_requests():
        while todo and step >= todo[0] * 3:
            number = todo.pop(0)
            prompt = llm.get_tokenizer().encode(f"Tell me about the number {number * 7 + 3}. " + gauntlet.TEXT)
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            watched.add_request(f"{prefix}{number}", {"prompt_token_ids": prompt[: 60 + 9 * number]}, params)
        for output in watched.step():
            if output.finished:
                said[output.request_id.split("-")[0].removeprefix(prefix)] = list(output.outputs[0].token_ids)
        step += 1
    return said


def orders_of(phase: dict[str, Any], stages: Any, seed: int) -> Any:
    """Return who orders moves in a phase."""
    cut = stages.plan.cut
    if "cuts" in phase:
        return ListedOrders(phase["cuts"], phase["steps_each"])
    return OneOrder(phase["once"], stages.plan) if "once" in phase else RandomOrders(seed, cut.layers, cut.ranks)


class Stage:
    """One engine on which one phase of work follows the other."""

    def __init__(self, llm: Any, has_faser: bool) -> None:
        self.llm = llm
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.stages = self.scheduler.stages if has_faser else None
        self.preempted: list[str] = []
        self.drafted = 0
        self._count_drafts()
        if has_faser:
            self.scheduler.on_preempt = lambda request: self.preempted.append(request.request_id)

    def _count_drafts(self) -> None:
        inherited = self.scheduler.update_draft_token_ids

        def update(drafts: Any) -> None:
            inherited(drafts)
            self.drafted += sum(map(len, drafts.draft_token_ids))

        self.scheduler.update_draft_token_ids = update

    def play(self, phase: dict[str, Any]) -> dict[str, Any]:
        """Return what the requests of a phase said in each of its rounds, and what happened on the way."""
        started = time.perf_counter()
        self.llm.reset_prefix_cache()
        self.preempted.clear()
        moved = 0 if self.stages is None else self.stages.plan.counts.moves
        inherited = None if self.stages is None else self.stages.plan.step
        spoil(self.stages, phase.get("control", ""))
        watched, rounds, cached = Watched(self.llm.llm_engine, self.stages, phase.get("kills")), [], 0
        while not rounds or (self.moves() - moved < phase.get("moves", 0) and len(rounds) < phase.get("rounds", 999)):
            if self.stages is not None and phase.get("is_moving", True):
                self.stages.orders = orders_of(phase, self.stages, phase.get("seed", 1) + len(rounds))
            said, hits = self.work(phase, watched, len(rounds), moved + phase.get("moves", 0))
            rounds.append(said)
            cached += hits
            self.llm.reset_prefix_cache()
        if self.stages is not None:
            self.stages.plan.step = inherited
        return {
            "rounds": rounds,
            "cached_tokens": cached,
            "preempted": len(self.preempted),
            "drafted": self.drafted,
            "moves": self.moves() - moved,
            "phase_s": time.perf_counter() - started,
            "times_s": watched.times_s,
            "switches": watched.switches,
            "bounds": None if self.stages is None else list(self.stages.plan.cut.bounds),
            "is_moving": self.stages is not None and self.stages.plan.move is not None,
            "uss_mib": memory_mib(),
        }

    def moves(self) -> int:
        """Count the moves of this engine."""
        return 0 if self.stages is None else int(self.stages.plan.counts.moves)

    def work(self, phase: dict[str, Any], watched: Watched, number: int, moves: int) -> tuple[dict[str, Any], int]:
        """Return what one round's requests said, and how many tokens came from the prefix cache."""
        if "least" in phase:
            run = short_requests.ShortRequests(watched, self.llm.get_tokenizer(), phase["has_aborts"])
            run.run(lambda sent: sent >= phase["least"] and self.moves() >= moves)
            return {"said": run.said, "counts": run.counts}, 0
        if "requests" in phase:
            return drive(self.llm, watched, phase["requests"], phase["tokens"], f"r{number}n"), 0
        run = gauntlet.Gauntlet(watched, self.llm.get_tokenizer())
        run.run()
        return run.outputs, run.cached_tokens


def main(scenario: dict[str, Any]) -> dict[str, Any]:
    """Return what requests said, and counts."""
    from vllm import LLM

    has_faser = scenario["has_faser"]
    llm = LLM(scenario["model"], **(CLASSES if has_faser else {}), **scenario["engine"])
    stage = Stage(llm, has_faser)
    if stage.stages is not None and (pace := scenario.get("pace")):
        stage.stages.plan.pace = type(stage.stages.plan.pace)(*pace)
    if scenario.get("is_killed"):
        kill_in_flight(Watched(llm.llm_engine, stage.stages))
    if "lost_rank" in scenario:
        return lose_rank(stage, scenario["lost_rank"])
    return {
        "phases": [stage.play(phase) for phase in scenario["phases"]],
        "counts": None if stage.stages is None else asdict(stage.stages.plan.counts),
        "ranks": llm.collective_rpc("stages_report") if has_faser else [],
    }


def lose_rank(stage: Stage, rank: int) -> dict[str, Any]:
    """Kill a rank in the middle of a move, or of a step where stages are off; return what the engine made of it."""
    ranks = [child.pid for child in workers()]
    watched = Watched(stage.llm.llm_engine, stage.stages, ranks[rank])
    if stage.stages is not None:
        stage.stages.orders = ListedOrders([[0], [stage.stages.plan.cut.layers // 2]], 12)
    started = time.perf_counter()
    try:
        drive(stage.llm, watched, 6, 48, "l")
    except Exception as error:
        seconds = time.perf_counter() - started
        return {"died_of": type(error).__name__, "text": str(error), "died_s": seconds, "processes": ranks}
    return {"died_of": None}


def kill_in_flight(watched: Watched) -> None:
    """Die as an engine core does that is killed, with requests in flight; the ranks are told first."""
    from vllm import SamplingParams

    for number in range(4):
        watched.add_request(f"k{number}", {"prompt_token_ids": list(range(5, 40))}, SamplingParams(max_tokens=400))
    for _ in range(8):
        watched.step()
    sys.stdout.write(json.dumps([child.pid for child in workers()]) + "\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    given = json.load(sys.stdin)
    Path(given["result"]).write_text(json.dumps(main(given)))
