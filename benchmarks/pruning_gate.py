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
from embedded_engine import start_engine
from measured_cells import begun, fill
from remote import Remote, serve
from sliced_arms import LEARNING, SLICE_TOKENS, SlicedArms, Told
from tables import table

from faser.controller.engine.machine import machine_facts, versions
from faser.engine_adapter.protocol import Prune, StopRule
from faser.engine_adapter.steering.steering import Steering
from faser.env.workload.prompts import held_out_prompts
from faser.models.embedded.pair import DRAFTER_CARD

ROOT: Final = Path(__file__).resolve().parent
RESULT: Final = ROOT / "results" / "pruning_gate.json"
HEADS: Final = DRAFTER_CARD.with_name("exits.safetensors")
GRID: Final = tuple((batch, length) for batch in (4, 8, 16, 32) for length in (3, 7))
ARMS: Final = ("full", "confidence", "gate")
ANSWER_TOKENS: Final = 128
SHORT_ANSWER_TOKENS: Final = 48  # of runs beforehand
DOUBTS: Final = (0.2, 0.3, 0.4, 0.55, 0.7)  # survival by confidence under which drafts end
LEARNING_TURNS: Final = 12  # at most
FAR_BEHIND: Final = 0.85  # of the tokens/s of drafts that end: drafts in full are no rival


class GateBench(SlicedArms):
    """In the child: the arms of pruning."""

    def __init__(self, layer: int, threshold: float, longest: int) -> None:
        llm = start_engine(longest, 64, enable_prefix_caching=False, max_model_len=640, max_num_batched_tokens=4096)
        super().__init__(llm, time.thread_time, first_steps=1)
        self.trained, self.cut = self.runner.pruning, Prune(layer, threshold)
        if self.trained is None:
            raise RuntimeError(f"the engine does not prune with {HEADS}; its log says why")
        self.prune: Prune | None = None
        self.stop: StopRule | None = None
        self.doubt = 0.0  # in arms that end drafts by confidence
        order, bench = Steering.order, self

        def ordered(steering: Any, *rest: Any) -> Any:
            made = order(steering, *rest)
            made.prune = made.next_prune = bench.prune
            made.stop = bench.stop
            return made

        Steering.order = ordered  # type: ignore[method-assign]

    def put_into(self, arm: str) -> None:
        """Put the engine into an arm."""
        is_pruning = arm == "gate"
        self.runner.pruning = self.trained if is_pruning else None
        self.runner.gate = self.gates[0] if is_pruning else None
        self.runner.drafter.candidates = 0  # with trained heads the runner sets it before each drafting
        self.prune = self.cut if is_pruning else None
        self.stop = None if arm == "full" else StopRule([1.0], [0.0], [self.doubt], [self.doubt])

    def step(self, arm: str) -> tuple[list[Any], str]:
        """Take a step; one that looks whether to prune runs other code."""
        outputs = self.engine.step()
        return outputs, "gate, looking" if arm == "gate" and self.outcome.report.prune_layer is not None else arm

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

    def beforehand(self, prompts: list[list[int]]) -> tuple[float, float]:
        """Return the doubt at which it is fastest to end drafts, and the speed of drafts in full beside that."""
        rates = dict.fromkeys((0.0, *DOUBTS), 1.0)
        for order in ((0.0, *DOUBTS), (*DOUBTS[::-1], 0.0)):
            for doubt in order:
                self.doubt = doubt
                rates[doubt] *= self.run("confidence" if doubt else "full", prompts, SHORT_ANSWER_TOKENS)
        best = max(DOUBTS, key=lambda one: rates[one])
        return best, math.sqrt(rates[0.0] / rates[best])

    def _record(self, prompts: list[list[int]]) -> None:
        doubt, self.doubt = self.doubt, DOUBTS[0]
        self.record("confidence", prompts, ANSWER_TOKENS)
        self.doubt = doubt

    def gated(self, batch: int, length: int, turns: int) -> dict[str, Any]:
        """Measure one batch size and draft length."""
        self.forget()
        self.steering.default.length, others = length, self.prompts(batch, 0)
        self.record("full", others, SHORT_ANSWER_TOKENS)  # warms up
        self.doubt, full = self.beforehand(others)
        arms = ARMS if full > FAR_BEHIND else tuple(arm for arm in ARMS if arm != "full")
        self._record(others)
        (gate,) = self.gates = (Told(),)
        for _ in range(LEARNING_TURNS):
            if gate.gain(batch) is None:
                self.timed += self.answer(("gate",), others, LEARNING)[0]
        for number in range(turns * 40 // (batch + 8)):
            prompts, order = self.prompts(batch, 1 + number), arms[:: -1 if number % 2 else 1]
            self._record(prompts)
            self.turn(order, order, prompts, number)
        gated = self.answered_steps()["gate"]
        return {
            "batch": batch, "length": length, "confidence": self.doubt, "full_beforehand": round(full, 4),
            "gain_seen_by_gate": gate.gain(batch), "timed": len(self.timed),
            "looked": sum(step.kind != "gate" for step in gated) / len(gated), "tokens_per_s": self.rates(),
        }  # fmt: skip


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
    wanted = [tuple(map(int, cell.split("x"))) for cell in given.cells.split(",")]
    arguments = [str(layer), str(threshold), str(max(length for _, length in wanted))]
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        environment = {"FASER_ENDPOINT": f"ipc://{folder}/e.sock", "FASER_EXIT_HEADS": str(HEADS)}
        with Remote(__file__, arguments, folder, environment) as engine:
            fill(
                given.out, report, "cells", wanted, lambda cell: (cell["batch"], cell["length"]),
                lambda cell: engine.ask("gated", *cell, given.turns),
            )  # fmt: skip
    print(table(report))


if __name__ == "__main__":
    if "--child" in sys.argv:
        own_layer, own_threshold, most_drafted = sys.argv[2:]
        serve(GateBench(int(own_layer), float(own_threshold), int(most_drafted)))
    else:
        main()
