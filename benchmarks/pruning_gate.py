"""What the gate makes of pruning on the embedded pair: `python benchmarks/pruning_gate.py [--turns 6]`.

One engine, one thread, batch 4, 8, 16 and 32 by drafts of 3 and 7: every draft verified to full depth (full), drafts
that end where the drafter doubts (confidence), and both that and trained exit heads under the gate (gate). All are
held to the same recorded answers (held_text.py). In a turn each arm answers one set of prompts, which tells its
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
import time
from pathlib import Path
from typing import Any, Final

import msgspec
from held_text import HeldText
from pruning import DOUBTS, Bench, begun, keep, measure, pair_options
from steady import Answers, Step, steady_rates
from tables import table

from faser.controller.engine.machine import commit, machine_facts, versions
from faser.engine_adapter.gate import Gate

RESULT: Final = Path(__file__).resolve().parent / "results" / "pruning_gate.json"
GRID: Final = tuple((batch, length) for batch in (4, 8, 16, 32) for length in (3, 7))
ARMS: Final = ("full", "confidence", "gate")
SLICE_TOKENS: Final = 12  # of each request
ANSWER_TOKENS: Final = 128
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


class GateBench(Bench):
    """In the child."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.held = HeldText(self.runner)

    def begin(self, prompts: list[list[int]], answer_tokens: int) -> list[str]:
        """Send the prompts, held to the answers of the last run."""
        self.held.texts = {
            f"{self.count + 1}.{index}": self.answers.get(tuple(prompt), []) for index, prompt in enumerate(prompts)
        }
        return super().begin(prompts, answer_tokens)

    def record(self, prompts: list[list[int]]) -> None:
        """Let the engine answer the prompts as it likes; runs of these prompts get the same tokens from now on."""
        self.answers.clear()
        self.run("confidence", prompts, self.length, DOUBTS[0], ANSWER_TOKENS)

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
                mode = "confidence" if doubt else "full"
                rates[doubt] *= self.run(mode, prompts, self.length, doubt)["tokens_per_s"]
        best = max(DOUBTS, key=lambda one: rates[one])
        return best, math.sqrt(rates[0.0] / rates[best])

    def gated(self, batch: int, length: int, turns: int) -> dict[str, Any]:
        """Measure one batch size and draft length."""
        self.length, others = length, self.prompts(batch, 0)
        self.run("full", others, length, 0.0)  # warms up
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
            "looked": sum(step.kind != "gate" for step in gated) / len(gated), "commit": self.options["commit"],
            "tokens_per_s": {arm: [round(rate, 4) for rate in values] for arm, values in rates.items()},
        }  # fmt: skip


def child(options: dict[str, Any]) -> None:
    """Measure the cells that are asked for; write the file after each."""
    bench = GateBench(options)
    for batch, length in options["cells"]:
        keep(Path(options["out"]), bench.gated(batch, length, options["turns"]))


def main() -> None:
    """Parse, measure what is not there yet, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--cells", default=",".join(f"{batch}x{length}" for batch, length in GRID))
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return
    pair = pair_options()
    said = {
        "heads": Path(pair["heads"]).name, "layer": pair["layer"], "threshold": pair["threshold"],
        "turns": given.turns, "tokens": ANSWER_TOKENS, "slice_tokens": SLICE_TOKENS,
        "machine": msgspec.to_builtins(machine_facts()), "versions": versions(),
    }  # fmt: skip
    done, out = begun(given.out, said), given.out.absolute()
    wanted = [tuple(map(int, cell.split("x"))) for cell in given.cells.split(",")]
    if missing := [cell for cell in wanted if cell not in done]:
        longest = max(length for _, length in wanted)
        how = {"oracle_layer": 15, "longest": longest, "cells": missing, "out": str(out), "commit": commit()}
        measure(said | pair | how, __file__)
    print(table(json.loads(out.read_text())))


if __name__ == "__main__":
    main()
