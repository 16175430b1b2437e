"""Drafting and verifying alone and together on every partition, in turns, and what overlap wins of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from machines import machine_for, sizes, told
from pair import Pair, Pass, pair_for

from faser.engine_adapter.partition.shares import PHASES, UNSPLIT, Partition, Phase
from faser.env.cost.overlap_bound import PhaseTimes, draft_ahead_bound, ping_pong_bound


def measure(is_dry: bool) -> dict[str, Any]:
    """Return times by requests, and what two groups that take turns win over one step of all."""
    pair = pair_for(machine_for(is_dry), (1, 2) if is_dry else (4, 8, 32, 64))
    found = {requests: times(pair, requests) for requests in pair.sizes.requests}
    turns = {f"{whole}": _ping_pong(found[whole], found[whole // 2]) for whole in found if whole // 2 in found}
    return {"requests": {f"{requests}": own for requests, own in found.items()}, "ping_pong": turns}


def _ping_pong(whole: dict[str, Any], half: dict[str, Any]) -> dict[str, Any]:
    """Return the gain on each partition, from the times at half the batch, and its bound on the whole device."""
    serial_ms = whole["partitions"][UNSPLIT]["step_ms"]["median"]
    gains = {name: round(serial_ms / (2.0 * own["step_ms"]["median"]), 4) for name, own in half["partitions"].items()}
    return gains | {"bound": round(ping_pong_bound(_alone(whole), _alone(half)), 4)}


def _alone(found: dict[str, Any]) -> PhaseTimes:
    own = found["partitions"][UNSPLIT]
    return PhaseTimes(own["draft_ms"]["median"] / 1e3, own["verify_ms"]["median"] / 1e3)


def times(pair: Pair, requests: int) -> dict[str, Any]:
    """Return times per partition; `gain` is unsplit's serial step over this one's, round by round.

    `interference` is a step of both phases over the longer of them alone on the same share: 1 where they are not in
    each other's way. `equal_tokens` tells of phases that are: a race shows as tokens that differ.
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
    taken = machine.rounds(arms, pair.sizes.rounds)
    equal = {partition.name: _equal(pair, arms, work, partition) for partition in ready}
    machine.forget()
    serial = taken[f"{UNSPLIT} step"]
    found: dict[str, Any] = {}
    for partition in ready:
        draft, verify, steps = (taken[f"{partition.name} {name}"] for name in ("draft", "verify", "step"))
        longer = [max(pair) for pair in zip(draft, verify, strict=True)]
        found[partition.name] = {
            "asked": sizes(partition), "allocated": sizes(partition, is_allocated=True),
            "draft_ms": told(draft), "verify_ms": told(verify), "step_ms": told(steps),
            "gain": told([one / own for one, own in zip(serial, steps, strict=True)]),
            "interference": told([own / one for one, own in zip(longer, steps, strict=True)]),
            "equal_tokens": equal[partition.name],
        }  # fmt: skip
    result: dict[str, Any] = {
        "length": pair.sizes.length, "context": pair.sizes.context,
        "layers": [pair.layers, pair.target.shape.layers], "partitions": found,
    }  # fmt: skip
    return result | {"ahead_bound": round(draft_ahead_bound(_alone(result)), 4)}


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
