"""Halves of a target's graphs, a graph being a call: what both leave where the whole leaves it, whatever leaves."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from faser.engine_adapter.patches.pruning import ShortBatch
from faser.engine_adapter.pruning import halves as module
from faser.engine_adapter.pruning.halves import Halves

HIDDEN, LAYERS, AUXILIARY = 3, 4, (0, 1, 3, 4)  # behind so many layers a drafter reads the states


class Shape(SimpleNamespace):
    """vLLM's descriptor, as far as it is looked at."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Decoder:
    """Layers that scale what they are given, each by its own number, and write to it as vLLM's do."""

    aux_hidden_state_layers = AUXILIARY

    def __init__(self) -> None:
        self.layers = [self._layer(index) for index in range(LAYERS)]

    def _layer(self, index: int) -> Any:
        def run(positions: Any, hidden: Any, residual: Any) -> tuple[Any, Any]:
            residual = hidden if residual is None else residual.add_(hidden)
            return residual * (2.0 + index) + positions[:, None], residual

        return run

    def embed_input_ids(self, token_ids: Any) -> Any:
        """Return states that tell tokens apart."""
        return token_ids[:, None].float() + torch.arange(HIDDEN)

    def norm(self, hidden: Any, residual: Any) -> tuple[Any, Any]:
        """Return their sum."""
        return hidden + residual, residual

    def _maybe_add_hidden_state(self, auxiliary: list[Any], index: int, hidden: Any, residual: Any) -> None:
        if index in self.aux_hidden_state_layers:
            auxiliary.append(hidden.clone() if residual is None else hidden + residual)


class Inputs:
    """The rows that stay, written by hand."""

    def __init__(self, _runner: Any, _groups: Any, most: int, _states: Any) -> None:
        self.hidden, self.residual = torch.zeros(most, HIDDEN), torch.zeros(most, HIDDEN)
        self.positions = torch.zeros(most, dtype=torch.int64)

    def attention_to_capture(self, _desc: Any) -> None:
        """Build nothing: no layer here attends."""

    def write(self, _step: Any, short: ShortBatch, _shape: Any, hidden: Any, residual: Any) -> None:
        """Write them."""
        count = len(short.rows)
        self.hidden[:count], self.residual[:count] = hidden[short.rows], residual[short.rows]
        self.positions[:count] = short.positions


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner with eight rows, whose graphs are calls."""
    shapes = [Shape(num_tokens=size, max_query_len=None) for size in (8, 4, 2)]
    monkeypatch.setattr(module, "captured_shapes", lambda _runner: shapes)
    monkeypatch.setattr(module, "attention_to_capture", lambda *_: None)
    monkeypatch.setattr(module, "capturing", lambda *_: nullcontext())
    monkeypatch.setattr(module, "recorded", lambda _manager, call: SimpleNamespace(replay=call))
    monkeypatch.setattr(module, "ShortInputs", Inputs)
    auxiliary = [torch.full((8, HIDDEN), -1.0) for _ in AUXILIARY]
    manager = SimpleNamespace(hidden_states=torch.full((8, HIDDEN), -1.0), aux_hidden_states=auxiliary)
    inputs = SimpleNamespace(input_ids=torch.arange(10, 18), positions=torch.arange(8))
    return SimpleNamespace(cudagraph_manager=manager, input_buffers=inputs, shapes=shapes)


def whole(runner: Any, rows: int) -> list[Any]:
    """Return the states and the auxiliary ones of a pass over all layers."""
    decoder, found = Decoder(), list[Any]()
    hidden, residual = decoder.embed_input_ids(runner.input_buffers.input_ids[:rows]), None
    decoder._maybe_add_hidden_state(found, 0, hidden, residual)
    for index, layer in enumerate(decoder.layers):
        hidden, residual = layer(runner.input_buffers.positions[:rows], hidden, residual)
        decoder._maybe_add_hidden_state(found, index + 1, hidden, residual)
    return [decoder.norm(hidden, residual)[0], *found]


@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("kept", [[0, 1, 2, 3, 4, 5, 6], [0, 2, 3, 6], [0, 5]], ids=["all", "four", "two"])
def test_rows_that_stay_have_what_the_whole_gives_them_and_the_others_nothing(
    runner: Any, layer: int, kept: list[int]
) -> None:
    halves, desc = Halves(runner, Decoder(), layer, [[]]), runner.shapes[0]
    assert halves.sizes == [2, 4, 8]
    for _ in range(2):  # nothing of the step before is left
        middle = halves.replay_first(desc)
        rows = torch.tensor(kept)
        short: Any = SimpleNamespace(rows=rows, positions=runner.input_buffers.positions[rows])
        shape = halves.cut(desc, None, short)  # type: ignore[arg-type]
        halves.replay_second(desc, shape, short)
    assert shape.num_tokens == next(size for size in (2, 4, 8) if size >= len(kept))
    assert middle.hidden.shape == (8, HIDDEN)
    assert halves.replays == 2
    states, *auxiliary = whole(runner, 8)
    left = torch.ones(8, dtype=torch.bool)
    left[rows] = False
    manager = runner.cudagraph_manager
    late = [at > layer for at in AUXILIARY]
    for found, expected, is_late in zip(
        (manager.hidden_states, *manager.aux_hidden_states), (states, *auxiliary), (True, *late), strict=True
    ):
        assert torch.equal(found[rows], expected[rows])
        assert torch.equal(found[left], torch.zeros_like(found[left]) if is_late else expected[left])
