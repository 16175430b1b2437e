"""The arithmetic of a cut against plain loops, and the exactness of its rule by exhaustive enumeration."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine_adapter.pruning.cut import Cut, CutBatch, after_first_failure, warm_up

Requests = list[tuple[int, list[bool]]]  # per request: prompt rows before the tested ones, and its checks

batches = st.lists(st.tuples(st.integers(0, 3), st.lists(st.booleans(), max_size=5)), min_size=1, max_size=6)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Let no test wait for it."""
    warm_up()


def shape_of(batch: Requests) -> CutBatch:
    drafts = np.array([len(checks) for _, checks in batch])
    lengths = np.array([before + len(checks) + 1 for before, checks in batch])
    return CutBatch(drafts, lengths, np.zeros(drafts.sum(), dtype=bool))


def cut_of(batch: Requests) -> Cut:
    shape = shape_of(batch)
    return Cut(shape, shape.kept(np.array([check for _, checks in batch for check in checks], dtype=bool)))


def kept_rows(checks: list[bool]) -> int:
    for row, check in enumerate(checks):
        if not check:
            return row + 1
    return len(checks) + 1


@given(batches)
def test_rows_behind_the_first_failing_one_leave(batch: Requests) -> None:
    cut = cut_of(batch)
    kept = [kept_rows(checks) for _, checks in batch]
    assert cut.kept.tolist() == kept
    assert cut.tests.tolist() == [min(k, len(checks)) for k, (_, checks) in zip(kept, batch, strict=True)]
    assert cut.has_bonus.tolist() == [all(checks) for _, checks in batch]
    rows, logits, tested, starts, ends, targets = [], [], [], [0], [], []
    start = logit = draft = 0
    for request, ((before, checks), k) in enumerate(zip(batch, kept, strict=True)):
        rows += range(start, start + before + k)
        logits += range(logit, logit + k)
        targets += range(len(tested) + request, len(tested) + request + min(k, len(checks)))
        tested += range(draft, draft + min(k, len(checks)))
        starts.append(len(rows))
        ends.append(len(tested))
        start, logit, draft = start + before + len(checks) + 1, logit + len(checks) + 1, draft + len(checks)
    assert cut.rows.tolist() == rows
    assert cut.logit_rows().tolist() == logits
    assert cut.tested.tolist() == tested
    assert sum(cut.removed) == start - len(rows)
    assert cut.most == max(np.diff(starts))
    assert cut.starts.tolist() == starts + cut.removed.tolist()
    bonus = [end + request for request, end in enumerate(ends)]  # a row behind the tests of each request
    assert cut.ends.tolist() == ends + [row + 1 for row in bonus] + bonus
    assert cut.targets.tolist() == targets


def test_without_numba_the_loops_are_the_same() -> None:
    """Such as beside benchmarks/gpu, whose machine has none; one line in the log says so."""
    code = (
        "import sys, numpy as np; sys.modules['numba'] = None\n"
        "from faser.engine_adapter.pruning.cut import after_first_failure\n"
        "cut = after_first_failure(np.array([2, 0, 3]), np.array([True, False, True, True, True]))\n"
        "print(*cut.kept, '|', *cut.rows, '|', *cut.tested, '|', *cut.targets)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.strip() == "2 1 4 | 0 1 3 4 5 6 7 | 0 1 2 3 4 | 0 1 4 5 6"
    assert "FASER cuts batches without compiled loops" in done.stderr


@dataclass
class Metadata:
    """As much of vLLM's CommonAttentionMetadata (0.32) as a cut touches, and a field that it leaves alone."""

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    seq_lens_cpu_upper_bound: Any
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    slot_mapping: Any
    positions: Any
    _num_computed_tokens_cache: Any
    _token_to_req_indices_cache: Any


def test_attention_metadata_are_those_of_the_rows_that_stay() -> None:
    import torch

    from faser.engine_adapter.patches.pruning import cut_common

    batch = CutBatch(np.array([2, 3]), np.array([3, 5]), np.zeros(5, dtype=bool))
    cut = Cut(batch, batch.kept(np.array([False, True, True, False, True])))  # rows 0 | 3 4 5
    starts, ends = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([10, 20], dtype=torch.int32)
    slots = torch.arange(100, 108)
    whole = Metadata(starts, starts, ends, ends, 8, 5, 20, slots, torch.arange(8), "old", "old")
    index, positions = torch.from_numpy(cut.rows), torch.arange(4)
    short = cut_common(whole, index, cut, positions)
    assert short.query_start_loc.tolist() == short.query_start_loc_cpu.tolist() == [0, 1, 4]
    assert short.seq_lens.tolist() == short.seq_lens_cpu_upper_bound.tolist() == [8, 18]
    assert short.query_start_loc.dtype == short.seq_lens.dtype == torch.int32
    assert (short.num_actual_tokens, short.max_query_len, short.max_seq_len) == (4, 3, 20)
    assert short.slot_mapping.tolist() == [100, 103, 104, 105]
    assert short.positions is positions
    assert short._num_computed_tokens_cache is short._token_to_req_indices_cache is None
    assert isinstance(short, Metadata)
    assert (whole.num_actual_tokens, whole.slot_mapping.tolist()) == (8, slots.tolist())  # vLLM's stays


def test_spared_tokens_pass_unseen() -> None:
    spared = np.array([False, False, True, True, True])
    batch = CutBatch(np.array([2, 3]), np.array([3, 4]), spared)
    assert batch.kept(np.array([True, False, False, False, False])).tolist() == [2, 4]


@given(batches)
def test_the_sampler_gets_a_row_per_test_and_one_more(batch: Requests) -> None:
    cut = cut_of(batch)
    expected, start = [], 0
    for _, checks in batch:
        kept = kept_rows(checks)
        rows = list(range(start, start + kept))
        expected += rows if all(checks) else [*rows, rows[-1]]
        start += len(checks) + 1
    assert cut.sampler_rows().tolist() == expected
    assert set(expected) == set(cut.logit_rows().tolist())


# --- the rule, enumerated: three words, three drafts, distributions that depend on the whole prefix ---

WORDS, DRAFTS = 3, 3
Words = tuple[int, ...]
Check = Callable[[Words], bool]  # of the drafts up to and with the token under test


def distribution(words: Words, salt: int) -> np.ndarray:
    chance = np.random.default_rng([salt, *words, len(words)])
    return chance.dirichlet(np.full(WORDS, 0.7))


def target(words: Words) -> np.ndarray:
    return distribution(words, 1)


def drafter(words: Words) -> np.ndarray:
    return distribution(words, 2)


def one_hot(words: Words) -> np.ndarray:
    return np.eye(WORDS)[drafter(words).argmax()]


def step(
    words: Words, draw: Callable[[Words], np.ndarray], check: Check, is_naive: bool
) -> Iterator[tuple[Words, float]]:
    """Yield (emitted words, probability) of one speculative step behind `words`."""
    for drafts in product(range(WORDS), repeat=DRAFTS):
        chance = float(np.prod([draw(words + drafts[:j])[drafts[j]] for j in range(DRAFTS)]))
        if not chance:
            continue
        checks = np.array([check(words + drafts[: j + 1]) for j in range(DRAFTS)])
        cut = after_first_failure(np.array([DRAFTS]), checks)
        tests, has_bonus = int(cut.tests[0]), bool(cut.has_bonus[0])
        if is_naive and not has_bonus:
            tests, has_bonus = int(cut.kept[0]) - 1, True
        yield from verified(words, drafts[:tests], has_bonus, draw, chance)


def verified(
    words: Words, drafts: Words, has_bonus: bool, draw: Callable[[Words], np.ndarray], chance: float
) -> Iterator[tuple[Words, float]]:
    accepted: Words = ()
    for token in drafts:
        p, q = target(words + accepted), draw(words + accepted)
        share = min(1.0, p[token] / q[token])
        rest = np.maximum(p - q, 0.0)
        if share < 1.0:
            for other in np.flatnonzero(rest):
                yield (*accepted, int(other)), chance * (1 - share) * float(rest[other] / rest.sum())
        chance *= share
        accepted = (*accepted, token)
    if not has_bonus:
        yield accepted, chance
        return
    for token, p in enumerate(target(words + accepted)):
        yield (*accepted, token), chance * float(p)


def emitted(
    count: int, draw: Callable[[Words], np.ndarray], check: Check, is_naive: bool = False
) -> dict[Words, float]:
    """Return the distribution of the first `count` words over as many steps as they take."""
    found: dict[Words, float] = {}
    open_paths: dict[Words, float] = {(): 1.0}
    while open_paths:
        words, chance = open_paths.popitem()
        for more, share in step(words, draw, check, is_naive):
            path = (words + more)[:count]
            into = found if len(path) == count else open_paths
            into[path] = into.get(path, 0.0) + chance * share
    return found


def exact(count: int) -> dict[Words, float]:
    return {
        path: float(np.prod([target(path[:j])[path[j]] for j in range(count)]))
        for path in product(range(WORDS), repeat=count)
    }


def distance(found: dict[Words, float]) -> float:
    wanted = exact(len(next(iter(found))))
    return max(abs(found.get(path, 0.0) - share) for path, share in wanted.items())


CHECKS: dict[str, Check] = {
    "the token's own value": lambda words: words[-1] != 1,
    "its whole past": lambda words: sum(words) % 3 != 2,
    "its share under the drafter": lambda words: bool(drafter(words[:-1])[words[-1]] > 0.4),
    "nothing passes": lambda words: False,
}


@pytest.mark.parametrize("draw", [drafter, one_hot])
@pytest.mark.parametrize("name", CHECKS)
def test_pruning_leaves_the_distribution_alone(name: str, draw: Callable[[Words], np.ndarray]) -> None:
    assert distance(emitted(3, draw, CHECKS[name])) < 1e-12


def test_control_the_naive_rule_does_not() -> None:
    assert distance(emitted(3, drafter, CHECKS["the token's own value"], is_naive=True)) > 0.05
