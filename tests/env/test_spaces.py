"""Clamps: whatever a policy says, what leaves is something the engine can run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine_adapter.protocol import Admission, Hello, Prune, StopRule
from faser.env.spaces import Action, Capabilities, clamp, clamp_lengths, fit_rows, is_other

CAPABILITIES = Capabilities(
    k_max=5, splits=("unsplit", "half"), exit_layers=(10, 20), max_batched_tokens=64, frontier=4
)  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ([0, 3, 9, -2], [0, 3, 5, 0]),
        ([1.4, 1.6, math.nan, math.inf, -math.inf], [1, 2, 0, 5, 0]),
        ([True, False], [1, 0]),
        (None, []),
        ([None, 2], [0, 2]),
    ],
)
def test_lengths_become_whole_numbers_within_bounds(raw: list[float] | None, expected: list[int]) -> None:
    assert clamp_lengths(np.array(raw) if raw is not None else None, 5).tolist() == expected


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("price", math.nan, None),
        ("price", 0.5, 0.5),
        ("split", 1, 1),
        ("split", 2, None),
        ("split", -1, None),
        ("frontier", 5, None),
        ("frontier", 4, 4),
        ("prune", Prune(10, 0.5), Prune(10, 0.5)),
        ("prune", Prune(11, 0.5), None),
        ("prune", Prune(10, math.nan), None),
        ("default_length", 99, 5),
        ("admission", Admission([1], [0.1]), None),  # an engine that verifies all it was given
    ],
)
def test_what_cannot_be_had_becomes_no_opinion(field: str, value: object, expected: object) -> None:
    action = Action(**{"lengths": np.array([1]), "default_length": 0, field: value})  # type: ignore[arg-type]
    assert getattr(clamp(action, CAPABILITIES), field) == expected


def test_an_action_with_nothing_to_clamp_stays_the_same_object() -> None:
    stop = StopRule([0.5] * 5, [1.0] * 5, [0.5] * 5, [0.5] * 5)
    action = Action(np.array([0, 5, 2]), 3, 0.5, split=1, frontier=3, prune=Prune(10, 0.5), stop=stop, reason="why")
    assert clamp(action, CAPABILITIES) is action


@pytest.mark.parametrize(
    ("field", "value", "is_clamped"),
    [
        ("lengths", np.array([2.0]), False),  # another type alone
        ("lengths", np.array([2.4]), True),
        ("lengths", np.array([6]), True),
        ("lengths", np.array([-1]), True),
        ("lengths", [2], False),
        ("default_length", 6, True),
        ("default_length", 2.0, False),
        ("default_length", math.nan, True),
        ("price", np.float64(0.5), False),
        ("price", math.inf, True),
        ("split", np.int64(1), False),
        ("split", 2, True),
        ("frontier", 5, True),
        ("prune", Prune(11, 0.5), True),
        ("stop", StopRule([0.5] * 5, [1.0] * 5, [0.5] * 5, [7.0] * 5), True),
    ],
)
def test_what_was_clamped_is_told_from_what_only_changed_its_type(field: str, value: object, is_clamped: bool) -> None:
    action = Action(**{"lengths": np.array([1]), "default_length": 0, field: value})  # type: ignore[arg-type]
    assert is_other(action, clamp(action, CAPABILITIES)) == is_clamped


def test_a_stop_rule_is_brought_into_bounds_or_dropped() -> None:
    def clamped(stop: StopRule, k_max: int = 2, *, is_async: bool = False) -> StopRule | None:
        return clamp(Action(np.array([1]), 0, stop=stop), Capabilities(k_max=k_max, is_async=is_async)).stop

    rule = StopRule([0.5], [1.0], [-1.0, 0.2, 0.9], [7.0])
    assert clamped(rule) == StopRule([0.5] * 2, [1.0] * 2, [0.0, 0.2], [1.0] * 2)
    assert clamped(StopRule([float("nan")], [0.0], [0.5], [0.5])) is None
    assert clamped(StopRule([], [0.0], [0.5], [0.5])) is None
    assert clamped(StopRule([0.5, math.nan], [1.0, 2.0], [0.5, 0.5], [0.5, 0.5])) is None  # not first, nor largest
    assert clamped(StopRule([0.5, -math.inf], [1.0, 2.0], [0.5, 0.5], [0.5, 0.5])) is None
    fitting = StopRule([0.5, 0.6], [1.0, 2.0], [0.5, 0.4], [0.5, 0.3])
    assert clamped(fitting) is fitting
    assert clamped(fitting, k_max=1) == StopRule([0.5], [1.0], [0.5], [0.5])
    assert clamped(rule, is_async=True) is None
    assert clamped(rule, k_max=0) is None


@given(
    st.lists(st.tuples(st.floats() | st.integers(-(1 << 40), 1 << 40), st.booleans()), max_size=80),
    st.integers(0, 64), st.integers(0, 300),
)  # fmt: skip
def test_lengths_are_brought_into_bounds_and_fit_the_batch(
    raw: list[tuple[float, bool]], k_max: int, max_rows: int
) -> None:
    clamped = clamp(Action(np.array([value for value, _ in raw]), 0), Capabilities(k_max=k_max)).lengths
    in_batch = np.array([inside for _, inside in raw], np.bool_)
    lengths = fit_rows(clamped, max_rows, in_batch)
    assert lengths.shape == (len(raw),)
    assert ((lengths >= 0) & (lengths <= k_max)).all()
    rows = in_batch.sum() + lengths[in_batch].sum()
    assert max_rows == 0 or lengths[in_batch].sum() == 0 or rows <= max_rows


def test_the_deepest_requests_give_rows_first() -> None:
    assert fit_rows(np.array([1, 5, 2]), 9, np.ones(3, np.bool_)).tolist() == [1, 3, 2]


def test_requests_that_wait_take_no_rows() -> None:
    in_batch = np.arange(600) < 3
    assert fit_rows(np.full(600, 5), 18, in_batch).tolist() == [5] * 600
    assert set(fit_rows(np.full(600, 5), 12, in_batch).tolist()) == {3}


def test_capabilities_take_over_what_the_engine_introduced() -> None:
    hello = Hello(
        boot_id="b", pid=1, host="h", adapter_version="0", vllm_version="0.32.0", model="m", device="cuda", runner="v2",
        is_async=True, method="eagle3", drafter="d", k_max=4, default_length=9, default_table=[(1, 4, 3)],
        max_requests=64, max_batched_tokens=512, kv_tokens=1000, graph_sizes=[8, 1, 2, 2], splits=["unsplit"],
        exit_layers=[], tensor_parallel=1, pipeline_parallel=1, data_parallel=1, data_parallel_rank=0, lease_steps=16,
        lease_ms=500, roster=[],
    )  # fmt: skip
    capabilities = Capabilities.from_hello(hello)
    assert (capabilities.k_max, capabilities.default_length, capabilities.graph_sizes) == (4, 4, (1, 2, 8))
    assert (capabilities.lease_steps, capabilities.lease_ms, capabilities.default_table) == (16, 500, ((1, 4, 3),))
