"""What the gate makes of pruning on the embedded pair: `python benchmarks/pruning_gate.py [--turns 6]`.

One engine, one thread, batch 4, 8, 16 and 32 by drafts of 3 and 7: every draft verified to full depth (full), drafts
that end where the drafter doubts (confidence), and both that and trained exit heads under the gate (gate). All three
give the same tokens, so they take turns within one set of answers, some steps at a time: a machine whose speed changes
within seconds is the same for all. A turn is three runs of one set of answers, in each of which another arm begins, so
that every arm serves every part of the text: some parts are easier to draft for by more than arms differ. A slice's
first step verifies what the slice before drafted and is left out; so are steps with prompt rows, and those after the
first request has left. The gate learns before it is measured, and probes while it is. Times are CPU time of the one
compute thread. Each cell is written to the JSON when it is done; a run that is started again goes on behind the last
one. docs/pruning.md's table is written at the end. Under an hour.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import msgspec
from pruning import Bench, begun, keep, measure, pair_options
from pruning_report import GATE_RESULT, GRID, write_tables

from faser.controller.bench_machine import commit, machine_facts
from faser.engine_adapter.gate import Gate

ARMS: Final = ("full", "confidence", "gate")
SLICE_TOKENS: Final = 12  # of each request
ANSWER_TOKENS: Final = 128
LEARNING_TURNS: Final = 12  # at most


class SlicedGate(Gate):
    """A gate that hears nothing of a slice's first step, which verifies what another way drafted."""

    is_deaf = False

    def note(self, requests: int, has_used: bool, time_s: float, tokens: int) -> None:
        """Take in a step."""
        if not self.is_deaf:
            super().note(requests, has_used, time_s, tokens)


class GateBench(Bench):
    """In the child."""

    def turn(self, arms: tuple[str, ...], prompts: list[list[int]], length: int, doubt: float) -> dict[str, float]:
        """Return each arm's tokens per second over all parts of the answers to the prompts."""
        time_s, tokens = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0)
        for first in range(len(arms)):
            self.serve(arms[first:] + arms[:first], prompts, length, doubt, time_s, tokens)
        return {arm: tokens[arm] / time_s[arm] for arm in arms}

    def serve(
        self, arms: tuple[str, ...], prompts: list[list[int]], length: int, doubt: float, time_s: dict[str, float],
        tokens: dict[str, int],
    ) -> None:  # fmt: skip
        """Answer the prompts with the arms in slices, the first one first; add up what each took and emitted."""
        self.put_into(arms[0], length, doubt)
        names = self.begin(prompts, ANSWER_TOKENS)
        emitted, slice_ = 0, -1
        while True:
            is_new = emitted // (SLICE_TOKENS * len(prompts)) > slice_
            if is_new:
                slice_ = emitted // (SLICE_TOKENS * len(prompts))
                self.put_into(arms[slice_ % len(arms)], length, doubt)
            self.gate.is_deaf = is_new
            self.reports.clear()
            started = time.thread_time()
            outputs = self.engine.step()
            took_s = time.thread_time() - started
            if any(output.finished for output in outputs):
                break
            fresh = sum(count for _, _, count in self.reports)
            emitted += fresh
            if not is_new:
                time_s[arms[slice_ % len(arms)]] += took_s
                tokens[arms[slice_ % len(arms)]] += fresh
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def gated(self, batch: int, length: int, turns: int) -> dict[str, Any]:
        """Measure one batch size and draft length."""
        others = self.prompts(batch, 0)
        self.run("full", others, length, 0.0)  # warms up
        doubt = self.best_doubt(others, length)
        self.gate = SlicedGate()
        for _ in range(LEARNING_TURNS):
            if self.gate.gain(batch) is None:
                self.turn(("gate",), others, length, doubt)
        found = [
            self.turn(ARMS[:: -1 if number % 2 else 1], self.prompts(batch, 1 + number), length, doubt)
            for number in range(turns)
        ]
        rates = {arm: [round(turn[arm], 4) for turn in found] for arm in ARMS}
        seen = self.gate.gain(batch)
        return {
            "batch": batch, "length": length, "confidence": doubt, "gain_seen_by_gate": seen, "tokens_per_s": rates,
            "commit": self.options["commit"],
        }  # fmt: skip


def child(options: dict[str, Any]) -> None:
    """Measure the cells that are asked for; write the file after each."""
    bench = GateBench(options)
    for batch, length in options["cells"]:
        keep(Path(options["out"]), bench.gated(batch, length, options["turns"]))


def main() -> None:
    """Parse, measure what is not there yet, write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--cells", default=",".join(f"{batch}x{length}" for batch, length in GRID))
    parser.add_argument("--out", type=Path, default=GATE_RESULT)
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return
    pair = pair_options()
    said = {
        "heads": Path(pair["heads"]).name, "layer": pair["layer"], "threshold": pair["threshold"],
        "turns": given.turns, "tokens": ANSWER_TOKENS, "slice_tokens": SLICE_TOKENS,
        "machine": msgspec.to_builtins(machine_facts()),
    }  # fmt: skip
    done, out = begun(given.out, said), given.out.absolute()
    wanted = [tuple(map(int, cell.split("x"))) for cell in given.cells.split(",")]
    if missing := [cell for cell in wanted if cell not in done]:
        longest = max(length for _, length in wanted)
        how = {"oracle_layer": 15, "longest": longest, "cells": missing, "out": str(out), "commit": commit()}
        measure(said | pair | how, __file__)
    if out == GATE_RESULT:
        write_tables()


if __name__ == "__main__":
    main()
