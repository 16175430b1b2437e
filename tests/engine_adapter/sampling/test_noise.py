"""Noise by seed and position: the target's distribution, no state, nothing shared between positions."""

from __future__ import annotations

from math import log, log1p

import pytest
from scipy.stats import chisquare, kstest

torch = pytest.importorskip("torch")

from faser.engine_adapter.sampling.noise import draw, draw_among_all, noise, stream_keys  # noqa: E402

DRAWS = 20_000
SIGNIFICANCE = 1e-4


def keys(count: int, seed: int = 7, first: int = 0) -> torch.Tensor:
    return stream_keys(torch.full((count,), seed), torch.arange(first, first + count))


def splitmix(state: int) -> int:
    """Return SplitMix64's output at a state, in whole numbers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ state >> shift) * factor) % 2**64
    return state ^ state >> 31


def test_noise_is_that_of_the_published_generator() -> None:
    """An answer with a seed is worth keeping only if the next release and another machine give it too."""
    golden = 0x9E3779B97F4A7C15
    assert [splitmix(n * golden % 2**64) for n in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    for seed, position, token in ((0, 0, 0), (7, 12, 1), (-(2**63), 131_071, 127_999), (-1, 1, 49_151)):
        key = splitmix((splitmix(seed % 2**64) + position * golden) % 2**64)
        share = ((splitmix((key + (token + 1) * golden) % 2**64) >> 32) + 0.5) / 2**32
        keyed = stream_keys(torch.tensor([seed]), torch.tensor([position]))
        assert keyed.item() % 2**64 == key
        assert noise(keyed, torch.tensor([token])).item() == pytest.approx(-log(-log1p(-share)), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("is_few", [True, False])
def test_draws_have_the_distribution_of_the_logits(is_few: bool) -> None:
    shares = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = torch.full((64,), -torch.inf)
    logits[3 : 3 + 5 * 7 : 7] = shares.log() + 4.0
    drawn = (draw if is_few else draw_among_all)(logits.expand(DRAWS, -1), keys(DRAWS))
    counts = torch.bincount(drawn, minlength=64)
    assert counts[logits.isinf()].sum() == 0
    assert chisquare(counts[3 : 3 + 5 * 7 : 7].tolist(), (shares * DRAWS).tolist()).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("by", ["seeds", "positions"])
def test_neighbouring_seeds_and_positions_share_nothing(by: str) -> None:
    """Pairs of draws are as frequent as if they were independent."""
    counted = torch.arange(2 * DRAWS)
    zeros = torch.zeros_like(counted)
    key = stream_keys(counted, zeros) if by == "seeds" else stream_keys(zeros, counted)
    drawn = draw_among_all(torch.zeros(8).expand(2 * DRAWS, -1), key)
    pairs = torch.bincount(drawn[0::2] * 8 + drawn[1::2], minlength=64)
    assert chisquare(pairs.tolist()).pvalue > SIGNIFICANCE


def test_noise_is_gumbels_to_its_end() -> None:
    found = noise(keys(1)[:, None], torch.arange(1 << 20))[0].double()
    assert kstest(found.numpy(), "gumbel_r").pvalue > SIGNIFICANCE
    assert torch.isfinite(found).all()
    assert -3.0 < found.min() < -2.4
    assert 11.0 < found.max() < 23.0


@pytest.mark.parametrize("spread", [0.5, 4.0, 12.0])
def test_leaving_out_tokens_that_cannot_win_changes_no_draw(spread: float) -> None:
    logits = torch.randn((400, 2_000), generator=torch.Generator().manual_seed(1)) * spread
    logits[::3, 100:] = -torch.inf
    assert draw(logits, keys(400)).tolist() == draw_among_all(logits, keys(400)).tolist()


def test_a_single_allowed_token_is_drawn() -> None:
    logits = torch.full((2_000, 50), -torch.inf)
    logits[:, 17] = -80.0
    assert draw(logits, keys(2_000)).unique().tolist() == [17]


def test_rows_of_missing_numbers_draw_something() -> None:
    logits = torch.full((2, 50), torch.nan)
    logits[1] = -torch.inf
    drawn = draw(logits, keys(2))
    assert all(0 <= token < 50 for token in drawn.tolist())


def test_no_rows_draw_nothing() -> None:
    assert draw(torch.zeros((0, 5)), keys(0)).tolist() == []


@pytest.mark.parametrize("is_compiled", [True, False])
def test_drafts_are_held_to_their_draws_up_to_the_first_wrong_one(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from faser.engine_adapter.sampling import noise as module

    if not is_compiled:
        monkeypatch.setattr(module, "_kernel", lambda: None)
    chance = torch.Generator().manual_seed(5)
    logits = torch.randn((300, 40), generator=chance) * 2
    columns = [place % 3 for place in range(300)]
    is_greedy = [place // 3 % 4 == 0 for place in range(300)]
    own = draw_among_all(logits, keys(300)).where(~torch.tensor(is_greedy), logits.argmax(-1))
    drafts = own.where(torch.rand(300, generator=chance) < 0.6, (own + 1) % 40)
    held = module.draw_while_right(logits, keys(300), drafts.int(), columns, is_greedy)
    for place, column in enumerate(columns):
        is_looked_at = all(own[before] == drafts[before] for before in range(place - column, place))
        assert (held[place] == own[place]) if is_looked_at else held[place] < 0


def test_where_numbers_are_missing_a_draft_is_held_to_any_token() -> None:
    from faser.engine_adapter.sampling.noise import draw_while_right

    logits = torch.full((3, 40), torch.nan)
    logits[2] = torch.arange(40.0)
    held = draw_while_right(logits, keys(3), torch.zeros(3, dtype=torch.int32), [0, 1, 0], [False] * 3)
    assert 0 <= held[0] < 40
    assert 0 <= held[2] < 40
