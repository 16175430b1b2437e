"""Drafting and verifying alone and together on every partition, in turns, at one batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from machines import told
from pair import Pair, Pass
from part_partitions import sizes

from faser.engine_adapter.partition.shares import PHASES, UNSPLIT, Partition, Phase


def measure(pair: Pair, requests: int) -> dict[str, Any]:
    """Return times per partition; `gain` is unsplit's serial step over this one's, round by round.

    `equal_tokens` tells of phases that get in each other's way: a race shows as tokens that differ.
    """
    machine = pair.machine
    ready = machine.partitions.ready
    work: dict[Phase, Pass] = {"draft": pair.draft(requests), "verify": pair.verify(requests)}
    for partition in ready:
        for phase in PHASES:
            machine.capture(partition, phase, requests, work[phase])
    arms: dict[str, Callable[[], None]] = {}
    for partition in ready:
        for name, phases in (("draft", PHASES[:1]), ("verify", PHASES[1:]), ("step", PHASES)):
            arms[f"{partition.name} {name}"] = _arm(pair, partition, phases, requests)
    times = machine.rounds(arms, pair.sizes.rounds)
    equal = {partition.name: _equal(pair, arms, work, partition) for partition in ready}
    machine.forget()
    serial = times[f"{UNSPLIT} step"]
    found = {}
    for partition in ready:
        steps = times[f"{partition.name} step"]
        found[partition.name] = {
            "asked": sizes(partition), "allocated": sizes(partition, is_allocated=True),
            "draft_ms": told(times[f"{partition.name} draft"]), "verify_ms": told(times[f"{partition.name} verify"]),
            "step_ms": told(steps), "gain": told([one / own for one, own in zip(serial, steps, strict=True)]),
            "equal_tokens": equal[partition.name],
        }  # fmt: skip
    return {
        "requests": requests, "length": pair.sizes.length, "context": pair.sizes.context,
        "layers": [pair.layers, pair.target.shape.layers], "partitions": found,
    }  # fmt: skip


def _equal(pair: Pair, arms: dict[str, Callable[[], None]], work: dict[Phase, Pass], partition: Partition) -> float:
    """Return the share of tokens, drafted and verified, that come out as they do one phase after the other."""
    answers = []
    for name in (UNSPLIT, partition.name):
        for phase in PHASES:
            work[phase].answer.fill_(-1)
        arms[f"{name} step"]()
        pair.machine.wait()
        answers.append(torch.cat([work[phase].answer.flatten() for phase in PHASES]))
    return float((answers[0] == answers[1]).float().mean())


def _arm(pair: Pair, partition: Partition, phases: tuple[Phase, ...], requests: int) -> Callable[[], None]:
    def run() -> None:
        with partition.side_by_side():
            for phase in phases:
                pair.machine.launch(partition, phase, requests)

    return run
