"""When a move is ready and what travels, on a toy engine whose ranks hold what they were really given."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from faser.engine_adapter.stages.cut import CutError, StageCut
from faser.engine_adapter.stages.move import MovePace, StagePlan
from faser.engine_adapter.stages.orders import StageStep
from faser.engine_adapter.stages.validity import Validity, Write, writes_of

LAYERS, RANKS, BLOCKS, TOKENS = 6, 3, 24, 4
QUICK = MovePace(bytes_per_step=1 << 20, layers_per_step=LAYERS)


def plan(pace: MovePace = QUICK, ranks: int = RANKS) -> StagePlan:
    return StagePlan(StageCut.even(ranks, LAYERS, ranks), Validity(ranks, LAYERS, BLOCKS, TOKENS), 100, pace)


def until_switch(stages: StagePlan, writes: list[Write], running: list[list[int]], most: int = 50) -> list[StageStep]:
    """Return the steps of a move, whose last one is the switch."""
    steps: list[StageStep] = []
    while not steps or not steps[-1].is_switch:
        steps.append(stages.step(writes, running))
        assert len(steps) <= most
    return steps


def test_without_an_order_nothing_moves() -> None:
    stages = plan()
    assert stages.order(None) is None
    assert stages.step([Write(0, 0, 4)], [[0]]) == StageStep((2, 4))


def test_full_blocks_go_ahead_and_only_the_tail_at_the_switch() -> None:
    stages = plan()
    stages.step([Write(0, 0, 4), Write(1, 0, 4), Write(2, 0, 2)], [[0, 1, 2]])
    stages.order((1, 4))
    ahead, switch = until_switch(stages, [Write(2, 2, 3)], [[0, 1, 2]])
    assert [(copy.layer, copy.source, copy.target, copy.blocks) for copy in ahead.ahead] == [(1, 0, 1, (0, 1))]
    assert ahead.loads == ((1, 1),)
    assert ahead.bounds == (2, 4)
    assert [copy.blocks for copy in switch.tail] == [(2,)]
    assert switch.bounds == (1, 4)
    assert stages.counts.most_tail_blocks == 1


def test_a_step_carries_no_more_than_its_bytes() -> None:
    stages = plan(MovePace(bytes_per_step=250, layers_per_step=LAYERS))
    stages.step([Write(block, 0, 4) for block in range(6)], [list(range(6))])
    stages.order((0, 4))
    steps = until_switch(stages, [], [list(range(6))])
    assert [sum(len(copy.blocks) for copy in step.ahead) for step in steps] == [2, 2, 2, 2, 2, 2, 0]
    assert steps[-1].tail == ()


def test_weights_are_loaded_before_the_switch_a_layer_at_a_time() -> None:
    stages = plan(MovePace(layers_per_step=1))
    stages.order((0, 0))
    steps = until_switch(stages, [], [])
    assert [step.loads for step in steps] == [((2, 0),), ((2, 1),), ((2, 2),), ((2, 3),), ()]


def test_a_prompt_that_fills_blocks_is_held_back_before_the_switch() -> None:
    stages = plan()
    blocks = list(range(12))
    stages.step(writes_of(blocks, TOKENS, 0, 12), [blocks])
    stages.order((1, 4))
    assert stages.is_thin([blocks])
    assert not stages.step(writes_of(blocks, TOKENS, 12, 1), [blocks]).is_switch
    assert not stages.is_thin([blocks])
    switch = stages.step(writes_of(blocks, TOKENS, 13, 12), [blocks])
    assert switch.is_switch
    assert [copy.blocks for copy in switch.tail] == [(3,)]


def test_a_prompt_that_is_not_held_back_keeps_a_move_waiting() -> None:
    stages = plan()
    blocks = list(range(12))
    stages.step(writes_of(blocks, TOKENS, 0, 12), [blocks])
    stages.order((1, 4))
    steps = [stages.step(writes_of(blocks, TOKENS, start, 12), [blocks]) for start in (12, 24, 36)]
    assert not any(step.is_switch for step in steps)


def test_a_second_order_is_refused_while_a_move_is_under_way() -> None:
    stages = plan(MovePace(layers_per_step=1))
    assert stages.order((1, 4)) is None
    assert stages.order((1, 4)) is None
    reason = stages.order((2, 2))
    assert reason is not None
    assert "a move to [1, 4] is under way" in reason
    assert stages.counts.refused == 1
    until_switch(stages, [], [])
    assert stages.order((2, 2)) is None
    assert stages.move is not None


def test_a_move_is_completed_though_nobody_wants_it_any_more() -> None:
    """A sidecar that dies in the middle of a move leaves no order behind."""
    stages = plan(MovePace(layers_per_step=1))
    stages.order((0, 0))
    for _ in range(5):
        stages.order(None)
        stages.step([], [])
    assert stages.cut.bounds == (0, 0)
    assert stages.move is None


def test_an_order_that_does_not_fit_is_an_error_and_changes_nothing() -> None:
    stages = plan()
    with pytest.raises(CutError, match="rising numbers"):
        stages.order((4, 2))
    assert stages.move is None
    assert stages.cut.bounds == (2, 4)


@dataclass
class Toy:
    """An engine of tokens: each rank really holds what it computed and what it was sent."""

    stages: StagePlan
    dice: random.Random
    control: str = ""
    wrong: int = 0
    running: dict[int, list[int]] = field(default_factory=dict)  # blocks by request
    lengths: dict[int, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    cached: set[int] = field(default_factory=set)  # full blocks that nobody holds
    clock: int = 0
    skipped: bool = False

    def __post_init__(self) -> None:
        self.truth: dict[tuple[int, int], int] = {}  # (block, place) -> when it was written
        self.memory: list[list[dict[tuple[int, int], int]]] = [
            [{} for _ in range(LAYERS)] for _ in range(self.stages.cut.ranks)
        ]
        self.queue: list[tuple[int, int, int, tuple[int, ...], dict[tuple[int, int], int]]] = []

    def step(self) -> None:
        self.clock += 1
        is_thin = self.stages.is_thin(list(self.running.values()))
        writes = self.schedule(is_thin)
        order = self.stages.step(writes, list(self.running.values()))
        self.carry(order)
        self.compute(writes)

    def schedule(self, is_thin: bool) -> list[Write]:
        """Let requests come, go, go on, and lose tokens that were drafts."""
        for name in list(self.running):
            if self.dice.random() < 0.08:
                self.release(name)
        if self.dice.random() < 0.5 and len(self.running) < 4:
            self.admit()
        writes = []
        for name, blocks in list(self.running.items()):
            if self.dice.random() < 0.2:
                continue  # not in this step
            if self.dice.random() < 0.1:
                self.lengths[name] = max(self.lengths[name] - 2, self.lengths[name] // TOKENS * TOKENS)
            length = self.lengths[name]
            count = 1 if is_thin else self.dice.choice([1, 1, 1, 2, 9])
            count = min(count, TOKENS * 5 - length)
            while len(blocks) * TOKENS < length + count and self.free:
                blocks.append(self.free.pop(self.dice.randrange(len(self.free))))
                self.cached.discard(blocks[-1])
            count = min(count, len(blocks) * TOKENS - length)
            if count <= 0:
                self.release(name)
                continue
            writes += writes_of(blocks, TOKENS, length, count)
            self.lengths[name] = length + count
        return writes

    def admit(self) -> None:
        name = self.clock
        prefix = [block for block in sorted(self.cached)[:2] if block in self.free]
        for block in prefix:  # a prefix hit on blocks that somebody else left behind
            self.free.remove(block)
            self.cached.discard(block)
        self.running[name], self.lengths[name] = prefix, len(prefix) * TOKENS

    def release(self, name: int) -> None:
        blocks, length = self.running.pop(name), self.lengths.pop(name)
        self.free += blocks
        self.cached |= set(blocks[: length // TOKENS])

    def carry(self, order: StageStep) -> None:
        for copy in (*order.ahead, *order.tail):
            blocks = copy.blocks
            if self.control == "none":
                continue
            if self.control == "stale" and len(blocks) and not self.skipped and self.clock > 20:
                blocks, self.skipped = blocks[1:], True
            held = self.memory[copy.source][copy.layer]
            sent = {key: value for key, value in held.items() if key[0] in blocks}
            self.queue.append((copy.layer, copy.target, self.clock, blocks, sent))
        if order.is_switch:
            for layer, target, _, _, sent in self.queue:
                self.memory[target][layer].update(sent)
            self.queue.clear()

    def compute(self, writes: list[Write]) -> None:
        for write in writes:
            for place in range(write.start, write.end):
                self.truth[write.block, place] = self.clock
        for layer, owner in enumerate(self.stages.cut.owners()):
            held = self.memory[owner][layer]
            for write in writes:
                held |= {(write.block, place): self.clock for place in range(write.start, write.end)}
            for name, blocks in self.running.items():
                keys = [(blocks[at // TOKENS], at % TOKENS) for at in range(self.lengths[name])]
                self.wrong += any(held.get(key) != self.truth[key] for key in keys)


def play(seed: int, control: str = "", steps: int = 400, ranks: int = RANKS) -> Toy:
    dice = random.Random(seed)
    pace = MovePace(dice.choice([150, 500, 5000]), dice.choice([1, 3]))
    toy = Toy(plan(pace, ranks), dice, control)
    for _ in range(steps):
        toy.stages.order(tuple(sorted(dice.randint(0, LAYERS) for _ in range(ranks - 1))))
        toy.step()
    return toy


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ranks", [2, 4])
def test_whoever_computes_a_layer_holds_every_token_of_it(seed: int, ranks: int) -> None:
    toy = play(seed, ranks=ranks)
    assert toy.wrong == 0
    assert toy.stages.counts.moves > 20
    assert toy.stages.counts.most_tail_blocks == 1
    assert toy.stages.counts.tail_blocks > 20
    assert toy.stages.counts.ahead_blocks > 20


@pytest.mark.parametrize("control", ["none", "stale"])
def test_the_comparison_fails_when_blocks_stay_behind(control: str) -> None:
    assert sum(play(seed, control).wrong > 0 for seed in range(8)) >= 4
