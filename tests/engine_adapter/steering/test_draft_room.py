"""How long a draft may be, step by step: requests that nobody looks at have the lengths that a look would give."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from faser.engine_adapter.steering import draft_room
from faser.engine_adapter.steering.draft_room import latched
from faser.engine_adapter.steering.lease import Lease
from faser.engine_adapter.steering.record import Entry
from faser.engine_adapter.steering.steering import Default, Steering

LONGEST = 5


@dataclass
class Request:
    """A request of an engine that does not exist; steps in flight have emitted nothing yet."""

    max_tokens: int
    num_prompt_tokens: int
    priority: int = 0
    is_prefill_chunk: bool = False
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_output_placeholders: int = 0
    in_flight: list[tuple[int, int]] = field(default_factory=list)  # tokens that each may emit, and does
    looks: int = 0

    @property
    def num_tokens(self) -> int:
        self.looks += 1
        return self.num_prompt_tokens + self.num_output_tokens


def known_tokens(request: Request) -> int:
    return request.num_prompt_tokens + request.num_output_tokens + request.num_output_placeholders


def useful(entry: Entry, rows: int, wanted: int) -> int:
    """Return how much of a draft so long is of use: the rule, asked of every request in every step."""
    request = entry.request
    length = min(wanted, entry.most)
    assert isinstance(request, Request)
    is_reading = request.num_computed_tokens + rows < known_tokens(request)
    if is_reading and (not request.num_output_tokens or entry.was_preempted):
        return 0
    room = request.max_tokens - request.num_output_tokens - 2
    return min(length, max(room - (request.num_output_placeholders > 0), 0)) if length >= room else length


def differing(seed: int, is_async: bool, steps: int = 120) -> int:
    """Return for how many requests, of a random engine's steps, a length or a copy differs from the rule's."""
    rng = random.Random(seed)
    entries: dict[str, Entry] = {}
    different = 0
    for step in range(1, steps + 1):
        if len(entries) < 6 and rng.random() < 0.3:
            request = Request(rng.choice([1, 2, 3, 9, 40, 200]), rng.randint(1, 40))
            most = rng.choice([64, 64, 64, 5, 2, 0])
            entries[f"r{step}"] = Entry(step, f"r{step}", request, 0.0, most)
        scheduled = {}
        for name, entry in entries.items():
            request = entry.request
            assert isinstance(request, Request)
            left = known_tokens(request) - request.num_computed_tokens
            scheduled[name] = min(left, rng.randint(1, 16)) if left > 1 else 1 + rng.randint(0, LONGEST)
        named = {entry.handle: rng.randint(0, LONGEST) for entry in entries.values() if rng.random() < 0.7}
        default, copied = rng.randint(0, 2), rng.choice([None, 0, 3, LONGEST])
        lengths, copies = latched(scheduled, entries, step, LONGEST, (named, default), copied)
        for name, entry in entries.items():
            rows = scheduled[name]
            different += lengths[name] != useful(entry, rows, named.get(entry.handle, default))
            different += copies.get(name) != (None if copied is None else useful(entry, rows, copied))
        for name, entry in list(entries.items()):
            serve(entry, scheduled[name], is_async, rng)
            if entry.request.num_output_tokens >= entry.request.max_tokens or rng.random() < 0.01:
                del entries[name]
            elif rng.random() < 0.02:
                preempt(entry)
    return different


def preempt(entry: Entry) -> None:
    """Take a request's cache away; what was in flight is lost."""
    entry.was_preempted, entry.roomy_until = True, 0  # as `Steering.preempt` does
    request = entry.request
    assert isinstance(request, Request)
    request.in_flight, request.num_computed_tokens, request.num_output_placeholders = [], 0, 0


def serve(entry: Entry, rows: int, is_async: bool, rng: random.Random) -> None:
    """Run the step of one request; without batches in flight it emits at once."""
    request = entry.request
    assert isinstance(request, Request)
    is_decoding = known_tokens(request) - request.num_computed_tokens == 1
    request.num_computed_tokens += rows
    if request.num_computed_tokens >= known_tokens(request):
        most = rows if is_decoding else 1
        request.in_flight.append((most, rng.randint(1, most)))
        request.num_output_placeholders += most
    while len(request.in_flight) > is_async:
        most, emitted = request.in_flight.pop(0)
        request.num_computed_tokens -= most - emitted
        request.num_output_placeholders -= most
        request.num_output_tokens += emitted


@pytest.mark.parametrize("is_async", [False, True])
def test_lengths_are_those_of_the_rule_asked_of_everybody_in_every_step(is_async: bool) -> None:
    assert sum(differing(seed, is_async) for seed in range(60)) == 0


def test_the_check_sees_a_request_that_is_left_alone_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a step may emit the longest draft and one token, not one token."""
    limit = draft_room._limit

    def careless(entry: Entry, rows: int, step: int, longest: int) -> int:
        found = limit(entry, rows, step, longest)
        entry.roomy_until += max(entry.roomy_until - step, 0)
        return found

    monkeypatch.setattr(draft_room, "_limit", careless)
    assert sum(differing(seed, is_async=False) for seed in range(60)) > 0


def test_a_request_far_from_its_end_is_looked_at_once_in_many_steps() -> None:
    request = Request(1000, 8, num_computed_tokens=8)
    entries = {"a": Entry(1, "a", request, 0.0)}
    for step in range(1, 101):
        latched({"a": 1}, entries, step, LONGEST, ({}, 3), 5)
        request.num_output_tokens += 1
    assert request.looks == 1


def one_request() -> tuple[Steering, Request]:
    """Return an adapter with a request that is behind its prompt."""
    request = Request(1000, 8, num_computed_tokens=8)
    hello: Any = SimpleNamespace(boot_id="b", is_async=False)
    link: Any = None
    adapter = Steering(hello, link, Lease("b", LONGEST, 32, 1.0), Default(0))
    adapter.arrive("a", request)
    return adapter, request


def test_a_session_is_looked_at_in_every_step_from_its_second_turn_on() -> None:
    """Each turn has a prompt and a limit of its own."""
    adapter, request = one_request()
    [entry] = adapter.entries.values()
    latched({"a": 1}, adapter.entries, 1, LONGEST, ({}, 3))
    assert entry.roomy_until > 100
    adapter.go_on("a")
    request.num_prompt_tokens = 20
    lengths, _ = latched({"a": 3}, adapter.entries, 2, LONGEST, ({}, 3))
    assert lengths == {"a": 0}  # within its next prompt
    request.num_computed_tokens, request.num_output_tokens = 20, 1
    latched({"a": 1}, adapter.entries, 3, LONGEST, ({}, 3))
    request.max_tokens = 4  # a turn that waited has begun
    lengths, _ = latched({"a": 1}, adapter.entries, 4, LONGEST, ({}, 3))
    assert lengths == {"a": 1}
    adapter.go_on("nobody")


def test_a_preempted_request_is_looked_at_again() -> None:
    adapter, request = one_request()
    latched({"a": 1}, adapter.entries, 1, LONGEST, ({}, 3))
    adapter.preempt("a")
    request.num_computed_tokens, request.num_output_tokens = 0, 4
    lengths, _ = latched({"a": 5}, adapter.entries, 2, LONGEST, ({}, 3))
    assert lengths == {"a": 0}  # it reads again what it had
