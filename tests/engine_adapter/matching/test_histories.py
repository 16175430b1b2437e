"""What ended requests answered: shared only where it was asked for, under one salt, and bounded."""

from __future__ import annotations

import numpy as np
import pytest

from faser.engine_adapter.matching.histories import END, GENERATION_TOKENS, Histories
from faser.engine_adapter.matching.regions import BYTES_PER_TOKEN, TextMemory
from faser.engine_adapter.matching.texts import Texts

HALF_BYTES = GENERATION_TOKENS * BYTES_PER_TOKEN
MUCH = 1 << 24
SALTS = {"a": "one", "b": "one", "c": "two"}


def drafted(texts: Texts, name: str, said: list[int], prompt: int, salts: dict[str, str] = SALTS) -> list[int]:
    """Return what is drafted for a request whose last token was just sampled."""
    tokens = np.array(said, np.int32)
    drafts = texts.find([name], [tokens[:-1]], tokens[None, -1:], np.array([4]), [prompt], salts)
    found: list[int] = drafts.tokens[0, : drafts.lengths[0]].tolist()
    return found


def answered(shared_bytes: int = 4 * HALF_BYTES) -> Texts:
    """Return the texts of an engine where a request under salt "one" answered 5, 6, 7, 8, 9."""
    texts = Texts(MUCH, shared_bytes)
    assert drafted(texts, "a", [1, 2, 5, 6, 7, 8, 9], 2) == []
    texts.forget(["a"], SALTS)
    return texts


def test_what_one_request_answered_another_copies() -> None:
    assert drafted(answered(), "b", [3, 4, 5, 6], 2) == [7, 8, 9]


@pytest.mark.parametrize(("name", "salts"), [("c", SALTS), ("b", {}), ("unknown", SALTS)])
def test_nothing_is_copied_under_another_salt_or_without_one(name: str, salts: dict[str, str]) -> None:
    assert drafted(answered(), name, [3, 4, 5, 6], 2, salts) == []


def test_nothing_is_shared_unless_memory_is_given_for_it() -> None:
    texts = answered(shared_bytes=0)
    assert drafted(texts, "b", [3, 4, 5, 6], 2) == []


def test_a_prompt_is_not_shared() -> None:
    texts = Texts(MUCH, 4 * HALF_BYTES)
    drafted(texts, "a", [11, 12, 13, 14, 5, 6], 4)
    texts.forget(["a"], SALTS)
    assert drafted(texts, "b", [9, 11, 12], 2) == []
    assert drafted(texts, "b", [9, 11, 12, 3, 14, 5], 2) == []


def test_ones_own_text_is_preferred_unless_the_others_match_is_longer() -> None:
    texts = answered()
    assert drafted(texts, "b", [5, 6, 1, 0, 5, 6], 2)[:1] == [1]
    texts.forget(["b"])
    assert drafted(texts, "b", [6, 7, 1, 0, 5, 6, 7], 2) == [8, 9]


def test_an_answer_ends_where_it_ended() -> None:
    texts = answered()
    assert drafted(texts, "b", [3, 8, 9], 2) == []
    assert drafted(texts, "b", [3, 8, 9, 7, 8], 2) == [9]


def test_the_oldest_answers_go_first_and_memory_is_bounded() -> None:
    memory = TextMemory(8 * HALF_BYTES)
    histories = Histories(memory, 2 * HALF_BYTES)
    for number in range(40):
        histories.add("one", np.full(GENERATION_TOKENS // 8 - 1, number, np.int32))
    halves = histories.where("one")
    kept = {int(token) for begin, _, size in halves for token in memory.tokens[begin : begin + size]}
    assert kept == {END, *range(40 - len(kept) + 1, 40)}
    assert 8 < len(kept) <= 17
    histories.add("two", np.arange(5, dtype=np.int32))
    assert histories.where("one") == [(0, 0, 0)] * 2, "the least used salt gives way"
    assert histories.where("two")[0][2] == 6


def test_an_answer_longer_than_a_half_is_kept_by_its_end() -> None:
    memory = TextMemory(8 * HALF_BYTES)
    histories = Histories(memory, 2 * HALF_BYTES)
    histories.add("one", np.arange(3 * GENERATION_TOKENS, dtype=np.int32))
    begin, _, size = histories.where("one")[0]
    assert size == GENERATION_TOKENS
    assert memory.tokens[begin + size - 2] == 3 * GENERATION_TOKENS - 1


def test_too_little_memory_shares_nothing() -> None:
    histories = Histories(TextMemory(8 * HALF_BYTES), HALF_BYTES - 1)
    histories.add("one", np.arange(9, dtype=np.int32))
    assert histories.where("one") == [(0, 0, 0)] * 2
