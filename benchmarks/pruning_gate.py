"""What the gate makes of pruning on the embedded pair: `python benchmarks/pruning_gate.py [--turns 6]`.

One engine, one thread, batch 4, 8, 16 and 32 by drafts of 3 and 7: every draft verified to full depth (full), drafts
that end where the drafter doubts (confidence), and both that and trained exit heads under the gate (gate). All are
held to the same recorded answers (embedded_engine.py). In a turn each arm answers one set of prompts, which tells its
steps; and twice they answer it taking turns after some tokens, which tells what steps take: steady.py says how one
makes a rate of both. Small batches take more turns. A slice's first step verifies what the slice before drafted and
is left out; so are steps with prompt rows, and those after the first request has left. Times are CPU time of the one
compute thread. Where a run beforehand shows drafts in full far behind they take no turns. The gate learns before it
is measured, and probes while it is. Each cell is written to the JSON when it is done; a run that is started again
goes on behind the last one. About an hour.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
from embedded_engine import HeldText, add_requests, start_engine
from measured_cells import begun, write
from remote import Remote, serve
from steady import Answers, Step, steady_rates
from tables import table

from faser.controller.engine.machine import commit, machine_facts, versions
from faser.engine_adapter.gate import Gate
from faser.engine_adapter.protocol import Prune, StopRule
from faser.engine_adapter.steering.steering import Steering
from faser.env.workload.prompts import held_out_prompts
from faser.models.embedded.pair import DRAFTER_CARD

ROOT: Final = Path(__file__).resolve().parent
RESULT: Final = ROOT / "results" / "pruning_gate.json"
HEADS: Final = DRAFTER_CARD.with_name("exits.safetensors")
GRID: Final = tuple((batch, length) for batch in (4, 8, 16, 32) for length in (3, 7))
ARMS: Final = ("full", "confidence", "gate")
SLICE_TOKENS: Final = 12  # of each request
ANSWER_TOKENS: Final = 128
SHORT_ANSWER_TOKENS: Final = 48  # of runs beforehand
DOUBTS: Final = (0.2, 0.3, 0.4, 0.55, 0.7)  # survival by confidence under which drafts end
LEARNING_TURNS: Final = 12  # at most
FAR_BEHIND: Final = 0.85  # of the tokens/s of drafts that end: drafts in full are no rival
LEARNING: Final = -1  # as a turn: steps of no answers


class SlicedGate(Gate):
    """A gate that hears nothing of a slice's first step, which verifies what another way drafted."""

    is_deaf = False

    def note(self, requests: int, has_used: bool, time_s: float, tokens: int) -> None:
        """Take in a step."""
        if not self.is_deaf:
            super().note(requests, has_used, time_s, tokens)


class GateBench:
    """In the child: the engine, the arms it can be put into, and what it answered."""

    def __init__(self, layer: int, threshold: float, longest: int) -> None:
        limits = {"max_model_len": 640, "max_num_batched_tokens": 4096}
        llm = start_engine(longest, 64, enable_prefix_caching=False, **limits)
        self.tokenizer, self.engine = llm.get_tokenizer(), llm.llm_engine
        self.runner: Any = self.engine.model_executor.driver_worker.worker.model_runner
        self.steering: Any = self.engine.engine_core.engine_core.scheduler.steering
        self.trained, self.cut = self.runner.pruning, Prune(layer, threshold)
        if self.trained is None:
            raise RuntimeError(f"the engine does not prune with {HEADS}; its log says why")
        self.held, self.gate = HeldText(self.runner), SlicedGate()
        self.prune: Prune | None = None
        self.stop: StopRule | None = None
        self.reports: list[tuple[Any, int, int]] = []  # of each step: its report, draft tokens, emitted tokens
        self.count = 0
        self.answers: dict[tuple[int, ...], list[int]] = {}  # of the last run, by prompt
        self._listen()

    def _listen(self) -> None:
        """Have every order carry the arm's rules, and keep every step's report."""
        order, record, bench = Steering.order, Steering.record, self

        def ordered(steering: Any, *rest: Any) -> Any:
            made = order(steering, *rest)
            made.prune = made.next_prune = bench.prune
            made.stop = bench.stop
            return made

        def recorded(steering: Any, given: Any, outcome: Any) -> None:
            if outcome.report is not None:
                drafted, emitted = sum(map(len, outcome.drafts.values())), sum(outcome.sampled.counts)
                bench.reports.append((outcome.report, drafted, emitted))
            record(steering, given, outcome)

        Steering.order, Steering.record = ordered, recorded  # type: ignore[method-assign]

    def put_into(self, arm: str, length: int, doubt: float) -> None:
        """Put the engine into an arm."""
        is_pruning = arm == "gate"
        self.steering.default.length = length
        self.runner.pruning = self.trained if is_pruning else None
        self.runner.gate = self.gate if is_pruning else None
        self.runner.drafter.candidates = 0  # with trained heads the runner sets it before each drafting
        self.prune = self.cut if is_pruning else None
        self.stop = None if arm == "full" else StopRule([1.0], [0.0], [doubt], [doubt])

    def begin(self, prompts: list[list[int]], answer_tokens: int) -> list[str]:
        """Send the prompts, held to the answers of the last run, and let the engine read them; return their names."""
        self.count += 1
        names = [f"{self.count}.{index}" for index in range(len(prompts))]
        self.held.texts = {
            name: self.answers.get(tuple(prompt), []) for name, prompt in zip(names, prompts, strict=True)
        }
        add_requests(self.engine, names, prompts, answer_tokens)
        for _ in range(2):
            self.engine.step()
        self.reports.clear()
        return names

    def run(self, arm: str, prompts: list[list[int]], doubt: float, answer_tokens: int = SHORT_ANSWER_TOKENS) -> float:
        """Answer the prompts in one arm, as in the last run of them; return tokens per second behind the prompts."""
        self.put_into(arm, self.length, doubt)
        self.begin(prompts, answer_tokens)
        spent_s, said = 0.0, dict[tuple[int, ...], list[int]]()
        first = sum(entry.request.num_output_tokens for entry in self.steering.entries.values())
        while self.engine.has_unfinished_requests():
            started = time.thread_time()
            outputs = self.engine.step()
            spent_s += time.thread_time() - started
            for output in outputs:
                if output.finished:
                    said[tuple(output.prompt_token_ids)] = list(output.outputs[0].token_ids)
        self.answers = said
        return (answer_tokens * len(prompts) - first) / spent_s

    def prompts(self, count: int, number: int) -> list[list[int]]:
        """Return one set of held-out chat prompts as token ids; no two sets share a prompt while there are enough."""
        short = [prompt for prompt in held_out_prompts() if prompt.tokens <= 250]
        Random(0).shuffle(short)
        chosen = [short[(number * count + index) % len(short)].text for index in range(count)]
        chats = [
            self.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
            for text in chosen
        ]
        return [list(chat["input_ids"]) if not isinstance(chat, list) else chat for chat in chats]

    def record(self, prompts: list[list[int]]) -> None:
        """Let the engine answer the prompts as it likes; runs of these prompts get the same tokens from now on."""
        self.answers.clear()
        self.run("confidence", prompts, DOUBTS[0], ANSWER_TOKENS)

    def turn(self, arms: tuple[str, ...], prompts: list[list[int]], doubt: float, number: int) -> None:
        """Let each arm answer the prompts, and twice all together."""
        self.record(prompts)
        for arm in arms:
            steps, tokens = self.serve((arm,), prompts, doubt, number)
            self.answered.setdefault(arm, []).append(Answers(tuple(steps), tokens))
        for order in (arms, arms[::-1]):
            self.timed += self.serve(order, prompts, doubt, number)[0]

    def serve(
        self, arms: tuple[str, ...], prompts: list[list[int]], doubt: float, number: int
    ) -> tuple[list[Step], int]:  # fmt: skip
        """Answer the prompts with the arms in slices, the first one first; return the steps and the tokens.

        With several arms a slice's first step is left out.
        """
        names, emitted, slice_, steps = [], 0, -1, []
        while True:
            is_new = emitted // (SLICE_TOKENS * len(prompts)) > slice_
            if is_new:
                slice_ = emitted // (SLICE_TOKENS * len(prompts))
                arm = arms[slice_ % len(arms)]
                self.put_into(arm, self.length, doubt)
                names = names or self.begin(prompts, ANSWER_TOKENS)
            self.gate.is_deaf = is_new and len(arms) > 1
            self.reports.clear()
            started = time.thread_time()
            outputs = self.engine.step()
            took_s = time.thread_time() - started
            if any(output.finished for output in outputs):
                break
            [(report, verified, fresh)] = self.reports
            if not is_new or len(arms) == 1:
                kind = "gate, looking" if arm == "gate" and report.prune_layer is not None else arm
                rows, drafting = len(prompts) + verified, report.rounds or ()
                work = (math.log(rows), float(rows), float(len(drafting)), float(sum(drafting)), float(emitted))
                steps.append(Step(kind, number, work, took_s))
            emitted += fresh
        self.check(outputs)
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return steps, emitted

    def check(self, outputs: list[Any]) -> None:
        """Raise if answers so far are not what they are held to."""
        for output in outputs:
            said = list(output.outputs[0].token_ids)
            if len(said) <= SLICE_TOKENS or said != self.held.texts[output.request_id][: len(said)]:
                raise RuntimeError(f"request {output.request_id} left the text that it is held to")

    def beforehand(self, prompts: list[list[int]]) -> tuple[float, float]:
        """Return the doubt at which it is fastest to end drafts, and the speed of drafts in full beside that."""
        rates = dict.fromkeys((0.0, *DOUBTS), 1.0)
        for order in ((0.0, *DOUBTS), (*DOUBTS[::-1], 0.0)):
            for doubt in order:
                rates[doubt] *= self.run("confidence" if doubt else "full", prompts, doubt)
        best = max(DOUBTS, key=lambda one: rates[one])
        return best, math.sqrt(rates[0.0] / rates[best])

    def gated(self, batch: int, length: int, turns: int) -> dict[str, Any]:
        """Measure one batch size and draft length."""
        self.length, others = length, self.prompts(batch, 0)
        self.run("full", others, 0.0)  # warms up
        doubt, full = self.beforehand(others)
        arms = ARMS if full > FAR_BEHIND else tuple(arm for arm in ARMS if arm != "full")
        self.record(others)
        self.gate, self.timed, self.answered = SlicedGate(), [], {}
        for _ in range(LEARNING_TURNS):
            if self.gate.gain(batch) is None:
                self.timed += self.serve(("gate",), others, doubt, LEARNING)[0]
        for number in range(turns * 40 // (batch + 8)):
            prompts = self.prompts(batch, 1 + number)
            self.turn(arms[:: -1 if number % 2 else 1], prompts, doubt, number)
        gated = [step for answer in self.answered["gate"] for step in answer.steps]
        rates = steady_rates(self.timed, self.answered)
        return {
            "batch": batch, "length": length, "confidence": doubt, "full_beforehand": round(full, 4),
            "gain_seen_by_gate": self.gate.gain(batch), "timed": len(self.timed),
            "looked": sum(step.kind != "gate" for step in gated) / len(gated),
            "tokens_per_s": {arm: [round(rate, 4) for rate in values] for arm, values in rates.items()},
        }  # fmt: skip


def start(folder: str, layer: int, threshold: float, longest: int) -> Remote:
    """Return the engine's process, ready."""
    environment = {"FASER_ENDPOINT": f"ipc://{folder}/e.sock", "FASER_EXIT_HEADS": str(HEADS)}
    engine = Remote(__file__, [str(layer), str(threshold), str(longest)], folder, environment=environment)
    engine.wait_ready()
    return engine


def main() -> None:
    """Parse, measure what is not there yet, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--cells", default=",".join(f"{batch}x{length}" for batch, length in GRID))
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    best = json.loads(HEADS.with_suffix(".card.json").read_text())["best"]
    layer, threshold = best["layer"], best["rule"]["threshold"]
    said = {
        "heads": HEADS.name, "layer": layer, "threshold": threshold, "turns": given.turns, "tokens": ANSWER_TOKENS,
        "slice_tokens": SLICE_TOKENS, "machine": msgspec.to_builtins(machine_facts()), "versions": versions(),
    }  # fmt: skip
    report = begun(given.out, said, {"cells": []})
    done = {(cell["batch"], cell["length"]) for cell in report["cells"]}
    wanted = [tuple(map(int, cell.split("x"))) for cell in given.cells.split(",")]
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        engine = start(folder, layer, threshold, max(length for _, length in wanted))
        try:
            for batch, length in [cell for cell in wanted if cell not in done]:
                cell = engine.ask("gated", batch, length, given.turns) | {"commit": commit()}
                report["cells"] = sorted([*report["cells"], cell], key=lambda one: (one["batch"], one["length"]))
                write(given.out, report)
                print(f"batch {batch}, k {length}: done", file=sys.stderr, flush=True)
        finally:
            engine.end()
    print(table(report))


if __name__ == "__main__":
    if "--child" in sys.argv:
        own_layer, own_threshold, most_drafted = sys.argv[2:]
        serve(GateBench(int(own_layer), float(own_threshold), int(most_drafted)))
    else:
        main()
