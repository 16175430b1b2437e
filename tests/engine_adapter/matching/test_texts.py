"""Looking up what followed the same words before, in bounded memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from faser.engine_adapter.matching import texts as matching
from faser.engine_adapter.matching.regions import BYTES_PER_TOKEN, LEAST_TOKENS, Regions
from faser.engine_adapter.matching.texts import CopiedDrafts, Texts, kept_of

MUCH = 1 << 24


def find(texts: Texts, said: list[int], most: int = 4, name: str = "a") -> CopiedDrafts:
    """Return what is drafted behind a whole text whose last token was just sampled."""
    tokens = np.array(said, np.int32)
    return texts.find([name], [tokens[:-1]], tokens[None, -1:], np.array([most]))


def drafted(texts: Texts, said: list[int], most: int = 4, name: str = "a") -> list[int]:
    """Return the tokens of it."""
    drafts = find(texts, said, most, name)
    return drafts.tokens[0, : drafts.lengths[0]].tolist()


def by_hand(said: list[int], most: int) -> list[int]:
    """Return what followed the longest end of the text that occurred before, the newest of equals; slowly."""
    for order in (8, 5, 3, 2):
        end = said[len(said) - order :]
        for at in range(len(said) - 1, order - 1, -1):
            if len(end) == order and said[at - order : at] == end:
                return [(said + said[at:] * most)[at + step] for step in range(most)]
    return []


def test_what_followed_the_same_words_is_drafted() -> None:
    assert drafted(Texts(MUCH), [1, 2, 3, 4, 5, 6, 9, 2, 3]) == [4, 5, 6, 9]


def test_the_newest_of_two_continuations_is_drafted() -> None:
    assert drafted(Texts(MUCH), [1, 2, 7, 9, 1, 2, 8, 9, 5, 1, 2]) == [8, 9, 5, 1]


def test_the_longer_of_two_matches_is_drafted() -> None:
    assert drafted(Texts(MUCH), [4, 1, 2, 7, 0, 3, 1, 2, 8, 0, 4, 1, 2], 1) == [7]


def test_one_word_alone_is_no_match() -> None:
    assert drafted(Texts(MUCH), [1, 2, 3, 5, 1]) == []


def test_a_text_that_repeats_itself_goes_on_behind_its_end() -> None:
    assert drafted(Texts(MUCH), [1, 2, 3, 1, 2, 3, 1, 2], 8) == [3, 1, 2, 3, 1, 2, 3, 1]


def test_random_texts_are_looked_up_as_by_hand_however_they_arrive() -> None:
    chance = random.Random(0)
    texts = Texts(MUCH)
    found = 0
    for name in map(str, range(60)):
        said = [chance.randrange(chance.choice([2, 5, 20])) for _ in range(20)]
        while len(said) < 400:
            fresh = [chance.randrange(6) for _ in range(chance.randint(1, 5))]
            width = len(fresh) + chance.randrange(3)
            padded = np.full((1, width), -1, np.int32)
            padded[0, : len(fresh)] = fresh
            most = chance.randint(0, 8)
            drafts = texts.find([name], [np.array(said, np.int32)], padded, np.array([most]))
            said += fresh
            expected = by_hand(said, most)
            assert drafts.tokens[0, : drafts.lengths[0]].tolist() == expected
            found += bool(expected)
    assert found > 1000


def test_requests_do_not_see_each_others_text() -> None:
    texts = Texts(MUCH)
    assert drafted(texts, [1, 2, 3, 4, 1, 2], name="a") == [3, 4, 1, 2]
    assert drafted(texts, [7, 7, 8, 1, 2], name="b") == []


def test_a_request_that_ended_leaves_nothing_behind() -> None:
    texts = Texts(LEAST_TOKENS * BYTES_PER_TOKEN)
    assert drafted(texts, [1, 2, 3, 4, 1, 2], name="a")
    texts.forget(["a", "unknown"])
    assert drafted(texts, [9, 9, 8, 1, 2], name="b") == []


def test_who_finds_no_room_gets_no_drafts_until_there_is_some() -> None:
    texts = Texts(LEAST_TOKENS * BYTES_PER_TOKEN)
    said = [1, 2, 3, 4, 1, 2]
    assert drafted(texts, said, name="a")
    assert drafted(texts, said, name="b") == []
    texts.forget(["a"])
    assert drafted(texts, said, name="b")


def test_a_text_that_outgrows_its_room_is_moved() -> None:
    texts = Texts(MUCH)
    said = [1, 2, 3, 4] * (LEAST_TOKENS // 2)
    for end in range(LEAST_TOKENS - 3, LEAST_TOKENS + 40):
        assert drafted(texts, said[:end]) == said[end : end + 4]


def test_a_text_that_got_shorter_is_read_anew() -> None:
    texts = Texts(MUCH)
    assert drafted(texts, [1, 2, 3, 4, 5, 1, 2]) == [3, 4, 5, 1]
    assert drafted(texts, [6, 6, 1, 2]) == []


def test_an_agreed_continuation_is_surer_than_a_disputed_one_and_a_longer_match_than_a_shorter_one() -> None:
    def logit(said: list[int]) -> float:
        return float(find(Texts(MUCH), said, 1).logits[0, 0])

    once, twice = [1, 2, 3, 9, 1, 2], [1, 2, 3, 9, 1, 2, 3, 8, 1, 2]
    disputed, longer = [1, 2, 4, 9, 1, 2, 3, 8, 1, 2], [5, 6, 1, 2, 3, 9, 5, 6, 1, 2]
    assert logit(twice) > logit(once) > logit(disputed)
    assert logit(longer) > logit(once)


def test_tokens_are_kept_while_they_are_worth_their_rows() -> None:
    drafts = CopiedDrafts(2, 3)
    drafts.lengths[:] = 3, 1
    drafts.logits[:] = [[2.0, 0.0, 2.0], [-1.0, 0.0, 0.0]]
    kept, net = kept_of(drafts, np.ones(3), np.zeros(3), np.full((2, 3), 0.4))
    first = 1 / (1 + np.exp(-2.0))
    assert kept.tolist() == [2, 0]
    assert net.tolist() == pytest.approx([first + first / 2 - 0.8, 0.0])
    calibrated, _ = kept_of(drafts, np.array([1.0, 2.0, 1.0]), np.array([-2.0, 5.0, 0.0]), np.full((2, 3), 0.4))
    assert calibrated.tolist() == [3, 0]
    other_prices, _ = kept_of(drafts, np.ones(3), np.zeros(3), np.array([[0.9] * 3, [0.2] * 3]))
    assert other_prices.tolist() == [0, 1]


def test_parts_never_overlap_and_all_is_whole_again_when_they_are_given_back() -> None:
    chance, regions, held = random.Random(1), Regions(1 << 12), dict[int, int]()
    for _ in range(2000):
        if held and chance.random() < 0.5:
            begin = chance.choice(list(held))
            regions.give_back(begin, held.pop(begin))
        else:
            size = 1 << chance.randint(5, 10)
            begin = regions.take(size)
            if begin is not None:
                assert all(begin + size <= other or other + much <= begin for other, much in held.items())
                held[begin] = size
    for begin, size in held.items():
        regions.give_back(begin, size)
    assert regions.take(1 << 12) == 0


def test_warming_up_leaves_nothing() -> None:
    matching.warm_up()
