"""The step-cost table learns a synthetic engine's times through noise, spikes and drift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from faser.env.cost.cost_table import NO_PROMPTS, CostTable, Prompts, StepCost
from faser.env.cost.cost_table_kernel import rising

BATCHES = (1, 4, 16, 64)


def verify_s(rows: int) -> float:
    """Flat at first, then linear: the shape of a real engine, not the prior's."""
    return 0.012 + 0.0007 * max(rows - 6, 0) + 0.00005 * rows


def draft_s(rows: int, batches: list[int]) -> float:
    """First pass over all rows, then ragged rounds."""
    return 0.001 + 5e-5 * rows + sum(0.002 + 1.5e-4 * n for n in batches)


def make_step(batch: int, length: int, slow: float, draft_slow: float | None = None) -> StepCost:
    rows, batches = batch * (1 + length), [batch] * length
    drafting = draft_s(rows, batches) * (slow if draft_slow is None else draft_slow)
    return StepCost(
        rows, 0, batch, batch * 200, length, batch * length, verify_s(rows) * slow + drafting, drafting, 0.0
    )


def teach(table: CostTable, steps: int, slow: Callable[[np.random.Generator], float], seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        table.learn(make_step(int(random.choice(BATCHES)), int(random.integers(0, 5)), slow(random)))


def noisy(random: np.random.Generator) -> float:
    return float(np.exp(random.normal(0.0, 0.1)) * (6.0 if random.random() < 0.03 else 1.0))


def test_it_converges_to_within_five_percent_through_noise_and_spikes() -> None:
    table = CostTable()
    teach(table, 3000, noisy)
    errors = []
    for batch in BATCHES:
        for length in range(5):
            rows, batches = batch * (1 + length), [batch] * length
            true = verify_s(rows) + draft_s(rows, batches)
            step_s = table.verify_time_s(rows) + table.draft_time_s(rows, length, batch * length)
            errors.append(float(step_s) / true - 1.0)
    # The noise's median is 1; what is common to all cells does not change a decision.
    assert np.abs(errors - np.median(errors)).max() < 0.05
    assert abs(np.median(errors)) < 0.05


def test_it_knows_what_it_does_not_know() -> None:
    table = CostTable()
    assert table.measured_steps == 0
    assert table.confidence([1, 64]).tolist() == [0.0, 0.0]
    for _ in range(20):
        table.learn(make_step(4, 0, 1.0))
    assert table.confidence(4) > 0.8
    assert table.confidence(128) == 0.0
    least, most = table.time_range_s(np.array([4.0, 64.0]), np.array([0.0, 3.0]), np.array([0.0, 12.0]))
    assert most[1] / least[1] > 2.0


def test_noise_does_not_make_more_rows_or_rounds_cheaper() -> None:
    table = CostTable()
    teach(table, 300, noisy)
    times_s = table.verify_time_s(np.arange(1, 9000))
    assert (np.diff(times_s) / times_s[:-1] >= -0.005).all()
    assert (np.diff(table.draft_time_s(64, np.arange(6), 64)) >= 0.0).all()


def test_a_row_count_that_is_slow_is_believed_if_it_is_so_again_and_again() -> None:
    """As on the CPU build of vLLM 0.32, where two rows take longer than three."""
    table, random = CostTable(), np.random.default_rng(2)
    for _ in range(1000):
        step = make_step(1, int(random.integers(0, 5)), noisy(random))
        slow_s = 0.15 * verify_s(2) if step.rows == 2 else 0.0
        table.learn(replace(step, total_s=step.total_s + slow_s))
    one_s, two_s, three_s, four_s = table.verify_time_s(np.arange(1, 5)).tolist()
    assert two_s == pytest.approx(1.15 * three_s, rel=0.06)
    assert one_s <= three_s <= four_s


def test_it_follows_a_machine_that_becomes_slower_everywhere() -> None:
    table = CostTable()
    teach(table, 1500, lambda _: 1.0)
    for _ in range(150):
        table.learn(make_step(16, 0, 3.0))
    assert float(table.verify_time_s(320)) == pytest.approx(3.0 * verify_s(320), rel=0.25)


def test_drafting_is_not_forgotten_while_nothing_is_drafted() -> None:
    table = CostTable()
    teach(table, 800, lambda _: 1.0)
    before = float(table.draft_time_s(64, 3, 48))
    for _ in range(4000):
        table.learn(make_step(16, 0, 1.0))
    assert float(table.draft_time_s(64, 3, 48)) == pytest.approx(before, rel=0.05)


def test_what_a_drafter_had_skipped_does_not_make_drafting_look_dear() -> None:
    """Every draft follows a time without one, and so begins with tokens to make up for."""

    def taught(is_told: bool) -> CostTable:
        table, random = CostTable(), np.random.default_rng(3)
        for number in range(600):
            batch, length = int(random.choice(BATCHES)), number % 4
            skipped = int(random.integers(0, 40)) * batch if length else 0
            plain = make_step(batch, length, 1.0)
            extra_s = 5e-5 * skipped  # rows of the first pass, like the step's own
            table.learn(
                replace(
                    plain,
                    total_s=plain.total_s + extra_s,
                    draft_s=plain.draft_s + extra_s,
                    caught_up=skipped if is_told else 0,
                )
            )
        return table

    true = draft_s(64, [16] * 3)
    table = taught(is_told=True)
    assert table.draft_time_s(64, 3, 48) == pytest.approx(true, rel=0.07)
    assert float(taught(is_told=False).draft_time_s(64, 3, 48)) > 1.5 * true


def test_captured_graphs_make_rows_up_to_the_next_size_free() -> None:
    table = CostTable(device="cuda", graph_sizes=(1, 2, 4, 8, 16))
    assert table.verify_time_s(5) == table.verify_time_s(8) < table.verify_time_s(9)
    assert table.verify_time_s(17) < table.verify_time_s(40)


@pytest.mark.parametrize(
    "step",
    [
        StepCost(0, 0, 0, 0, 0, 0, 0.01, 0.0, 0.0),
        StepCost(4, 0, 4, 9, 0, 0, 0.0, 0.0, 0.0),
        StepCost(4, 0, 4, 9, 0, 0, 0.01, 0.02, 0.0),
        StepCost(4, 0, 4, 9, 0, 0, 1e9, 0.0, 0.0),
        StepCost(4, 0, 4, 9, 0, 0, 0.01, -1.0, 0.0),
    ],
)
def test_impossible_times_teach_nothing(step: StepCost) -> None:
    table = CostTable()
    table.learn(step)
    assert table.measured_steps == 0


@pytest.mark.parametrize(
    ("values", "weights", "expected"),
    [
        ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]),
        ([3.0, 1.0], [1.0, 1.0], [2.0, 2.0]),
        ([9.0, 1.0], [1.0, 7.0], [2.0, 2.0]),
        ([1.0, 5.0, 3.0, 4.0, 9.0], [1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 4.0, 4.0, 4.0, 9.0]),
    ],
)
def test_a_curve_is_made_rising_by_weight(values: list[float], weights: list[float], expected: list[float]) -> None:
    assert rising(np.array(values), np.array(weights)).tolist() == expected


def test_what_making_up_for_skipped_tokens_costs_is_learnt_by_itself() -> None:
    table = CostTable()
    for number in range(400):
        plain, skipped = make_step(16, 1 + number % 3, 1.0), 400 if number % 8 == 0 else 0
        extra_s = 7e-5 * skipped
        table.learn(replace(plain, total_s=plain.total_s + extra_s, draft_s=plain.draft_s + extra_s, caught_up=skipped))
    assert table.catch_up_time_s(1000) == pytest.approx(0.07, rel=0.1)
    assert table.catch_up_time_s(0) == 0.0


@pytest.mark.parametrize(("idle_row_s", "extra_s"), [(0.0, 0.07), (7e-5, 0.0)])
def test_reading_prompts_is_a_price_of_drafting_only_where_a_drafter_else_skips_them(
    idle_row_s: float, extra_s: float
) -> None:
    table = CostTable()
    for number in range(400):
        drafts, prompt = number // 8 % 2, 300 if number % 8 == 0 else 0
        read_s = prompt * (7e-5 if drafts else idle_row_s)
        plain = make_step(16, 2 * drafts, 1.0)
        table.learn(
            replace(
                plain, rows=plain.rows + prompt, prefill_rows=prompt, total_s=plain.total_s + read_s + 0.0003 * prompt,
                draft_s=plain.draft_s + read_s, all_draft=bool(drafts),
            )
        )  # fmt: skip
    assert table.keep_up_time_s(1000) == pytest.approx(extra_s, rel=0.15, abs=0.01)


def test_a_step_that_only_catches_up_is_no_idle_reading() -> None:
    """The drafter makes up for a part and nobody drafts yet: its time is not that of the prompt beside it."""
    table, idle = CostTable(), make_step(16, 0, 1.0)
    for number in range(200):
        table.learn(make_step(16, number % 3, 1.0))
        table.learn(replace(idle, rows=416, prefill_rows=400, caught_up=512, draft_s=0.036, total_s=0.3))
    assert table.keep_up_time_s(1000) == pytest.approx(table.catch_up_time_s(1000))
    assert table.catch_up_time_s(1000) > 0.0


def test_prompts_behind_which_not_everybody_drafts_teach_nothing_about_reading() -> None:
    """Some of their rows were left out, and nobody says how many."""

    def taught(read_s: float) -> CostTable:
        table = CostTable()
        for number in range(200):
            plain, prompt = make_step(16, 2, 1.0), 300 if number % 8 == 0 else 0
            extra_s = read_s if prompt else 0.0
            table.learn(
                replace(
                    plain, rows=plain.rows + prompt, prefill_rows=prompt, total_s=plain.total_s + extra_s,
                    draft_s=plain.draft_s + extra_s,
                )
            )  # fmt: skip
        return table

    assert taught(1.0).keep_up_time_s(1000) == taught(0.0).keep_up_time_s(1000)


def test_prompts_do_not_make_drafts_beside_them_look_cheap() -> None:
    """A prompt's row costs half of a row that decodes: no LM head, no sampler."""
    random, table = np.random.default_rng(5), CostTable()
    for number in range(1500):
        batch, length = int(random.choice(BATCHES)), number % 4
        prompt = int(random.integers(60, 300)) if number % 3 == 0 else 0
        plain = make_step(batch, length, noisy(random))
        table.learn(
            replace(plain, rows=plain.rows + prompt, prefill_rows=prompt, total_s=plain.total_s + 0.000375 * prompt)
        )
    assert table.prompt_row == pytest.approx(0.5, rel=0.2)
    beside = np.array([4.0, 16.0, 64.0]) + table.prompt_rows(150)
    rows_s = (table.verify_time_s(beside + 32) - table.verify_time_s(beside)) / 32
    assert rows_s.mean() == pytest.approx(0.00075, rel=0.2)
    assert table.prefill_time_s(16, table.prompt_rows(150)) == pytest.approx(150 * 0.000375, rel=0.25)


def test_a_row_beside_prompts_costs_at_least_what_it_costs_without_them() -> None:
    """Even where the curve is too flat at many rows, because a prompt's row is taken for more than it is."""
    flat, steep = CostTable(), CostTable()
    for table, row_s in ((flat, 1e-5), (steep, 3e-3)):
        for _ in range(200):
            for n in (4, 16, 24, 64, 96):
                table.learn(StepCost(n, 0, n, 0, 0, 0, 0.01 + 1e-3 * min(n, 24) + row_s * max(n - 24, 0), 0.0, 0.0))
    rows = np.array([16.0, 24.0])
    alone_s = flat.verify_time_s(rows)
    always = Prompts(60.0, 1.0)
    assert flat.beside_prompts_s(rows, 16, NO_PROMPTS) == pytest.approx(alone_s)
    assert flat.beside_prompts_s(rows, 16, always) == pytest.approx(alone_s)
    beside_s = steep.beside_prompts_s(rows, 16, always)
    at_times_s = steep.beside_prompts_s(rows, 16, Prompts(60.0, 0.25))
    assert at_times_s == pytest.approx(0.75 * steep.verify_time_s(rows) + 0.25 * beside_s)
    assert beside_s[0] == pytest.approx(steep.verify_time_s(16)), "their own time is not counted"
    assert beside_s[1] - beside_s[0] == pytest.approx(8 * 3e-3, rel=0.15)
    for table, extra_s in ((flat, alone_s[1] - alone_s[0]), (steep, beside_s[1] - beside_s[0])):
        for bound_s in table.time_range_s(rows, np.zeros(2), np.zeros(2), always):
            assert bound_s[1] - bound_s[0] == pytest.approx(extra_s, rel=0.5)


def test_a_prompts_row_is_never_dearer_than_one_that_decodes() -> None:
    """Else curve and prompts' rows lean on each other: the flatter the one, the dearer the others."""
    random, table = np.random.default_rng(6), CostTable()
    for number in range(600):
        prompt = 300 if number % 3 == 0 else 0
        rows = 64 + int(random.integers(40, 110))
        table.learn(StepCost(rows + prompt, prompt, 64, 0, 0, 0, 0.012 + 14e-5 * (rows + 4 * prompt), 0.0, 0.0))
    assert table.prompt_row == 1.0
    assert table.verify_time_s(np.array([110.0, 160.0])) == pytest.approx([0.0274, 0.0344], rel=0.03)


def test_a_step_is_learnt_at_the_captured_size_that_ran() -> None:
    table = CostTable(device="cuda", graph_sizes=(4, 8, 16), max_rows=64)
    for _ in range(50):
        table.learn(StepCost(5, 0, 5, 500, 0, 0, 0.01, 0.0, 0.0))
    known = dict(zip(table.nodes.tolist(), table.visits.tolist(), strict=True))
    assert known[8.0] > 10.0
    assert known[4.0] == 0.0
    assert table.verify_time_s([6, 8]) == pytest.approx([0.01, 0.01], rel=0.01)
