"""Drafter and target of one measurement, built once for all batch sizes, and the work of both phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from decoder import Decoder
from machines import Machine
from shapes import DRAFTER, TARGET, TINY_DRAFTER, TINY_TARGET, Shape

SHARE_OF_MEMORY = 0.8  # the rest is for graphs and what runs in them


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a step does."""

    requests: tuple[int, ...]
    length: int  # draft tokens
    context: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Pass:
    """Work that can be run or captured, and the static buffer that its tokens end up in."""

    run: Callable[[], None]
    answer: torch.Tensor

    def __call__(self) -> None:
        self.run()


def pair_for(machine: Machine, requests: tuple[int, ...]) -> Pair:
    """Return the timed pair, the tiny one in the dry run, for batches of these sizes."""
    if machine.is_dry:
        return Pair(machine, TINY_DRAFTER, TINY_TARGET, Sizes(requests, length=2, context=8, rounds=2))
    return Pair(machine, DRAFTER, TARGET, Sizes(requests, length=4, context=1024, rounds=15))


class Pair:
    """Two models with random weights; as many of the target's layers as the device holds."""

    def __init__(self, machine: Machine, drafter: Shape, target: Shape, sizes: Sizes) -> None:
        self.machine, self.sizes = machine, sizes
        most, room = max(sizes.requests), 2 * sizes.length + 2
        free = SHARE_OF_MEMORY * machine.free_bytes()
        own = 2 * (drafter.vocabulary_elements + drafter.layers * drafter.layer_elements)
        own += 4 * drafter.layers * most * (sizes.context + room) * drafter.kv_heads * drafter.head_size
        self.layers = target.layers_within(free - own, most, sizes.context + room)
        if self.layers < min(4, target.layers):
            raise MemoryError(f"{target.name}: {self.layers} of {target.layers} layers fit into {free / 1e9:.0f} GB")

        def build(shape: Shape, layers: int) -> Decoder:
            return Decoder(
                shape, layers=layers, requests=most, context=sizes.context, room=room, device=machine.device,
                dtype=machine.dtype, is_fused=not machine.is_dry,
            )  # fmt: skip

        self.drafter, self.target = build(drafter, drafter.layers), build(target, self.layers)

    def draft(self, requests: int) -> Pass:
        """Return the drafter's work: `length` passes, each over the tokens of the one before."""
        first = self.tokens(requests, 1)
        drawn = torch.zeros(requests, self.sizes.length, dtype=torch.int64, device=self.machine.device)

        def work() -> None:
            tokens = first
            for number in range(self.sizes.length):
                flow = self.drafter.enter(tokens)
                flow = self.drafter.through(flow, requests, 0, len(self.drafter.layers), self.drafter.context + number)
                tokens = self.drafter.leave(flow)[:, None]
                drawn[:, number] = tokens[:, 0]

        return Pass(work, drawn)

    def verify(self, requests: int) -> Pass:
        """Return the target's work: one pass over 1 + length rows of each request."""
        tokens = self.tokens(requests, 1 + self.sizes.length)
        answer = torch.zeros(tokens.numel(), dtype=torch.int64, device=self.machine.device)

        def work() -> None:
            flow = self.target.through(self.target.enter(tokens), requests, 0, self.layers, self.target.context)
            answer.copy_(self.target.leave(flow))

        return Pass(work, answer)

    def tokens(self, requests: int, rows: int) -> torch.Tensor:
        """Return (requests, rows) token ids, the same at every call."""
        vocabulary = min(self.drafter.shape.vocabulary, self.target.shape.vocabulary)
        draw = torch.Generator().manual_seed(requests)
        return torch.randint(vocabulary, (requests, rows), generator=draw).to(self.machine.device)
