"""Draws by seed in front of vLLM's real samplers: whose tokens change, whose do not, and what a failure does."""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from faser.engine_adapter.hook_guard import HookGuard  # noqa: E402
from faser.engine_adapter.patches import v1  # noqa: E402
from faser.engine_adapter.sampling import seeded_step  # noqa: E402
from faser.engine_adapter.sampling.noise import draw, stream_keys  # noqa: E402
from faser.engine_adapter.sampling.seeded_runner import SeededRunner  # noqa: E402

VOCABULARY = 32
SEEDS = {1: 11, 3: -5, 4: 12}  # of five rows; row 2 is greedy
COMPUTED = [10, 20, 30, 40, 50]  # tokens of each request before the step
DRAFTED = [2, 3, 1, 0, 2]


class Samplers:
    """What the hooks need of vLLM's runner: its samplers, and a batch."""

    device = torch.device("cpu")
    _draft_probs: Any = None

    def __init__(self, drafts: list[int], seeds: dict[int, int]) -> None:
        from vllm.v1.sample.rejection_sampler import RejectionSampler
        from vllm.v1.sample.sampler import Sampler

        self.sampler = Sampler()
        self.rejection_sampler = RejectionSampler(self.sampler)
        generators = {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}
        names = [f"r{row}" for row in range(len(drafts))]
        drawn = {names[row] for row, temperature in enumerate(temperatures(generators, len(drafts))) if temperature}
        self.input_batch = SimpleNamespace(
            generators=generators, num_reqs=len(drafts), req_ids=names, random_reqs=drawn
        )
        self.discard_request_mask = SimpleNamespace(np=np.zeros(len(drafts), dtype=bool))
        ends = torch.tensor([0, *np.cumsum([count + 1 for count in drafts])])
        self.query_start_loc = SimpleNamespace(gpu=ends.int())
        self.positions = torch.cat([torch.arange(n, n + k + 1) for n, k in zip(cycle(COMPUTED), drafts, strict=False)])

    def _sample(self, logits: Any, metadata: Any) -> Any:
        sampling = sampling_metadata(self.input_batch.generators, self.input_batch.num_reqs)
        if metadata is None:
            return self.sampler(logits=logits, sampling_metadata=sampling)
        return self.rejection_sampler(metadata, self._draft_probs, logits, sampling)

    def _bookkeeping_sync(self) -> list[int]:
        return list(self.input_batch.generators)


class SeededSamplers(SeededRunner, Samplers):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._guard = HookGuard("model runner", logging.getLogger("faser.test"))


def temperatures(generators: Any, count: int) -> Any:
    """Return (rows,): the first row without a seed draws too, the others without one are greedy."""
    temperature = torch.full((count,), 0.8)
    temperature[list(set(range(count)) - generators.keys())[1:]] = 0.0
    return temperature


def sampling_metadata(generators: Any, count: int) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    zeros = torch.zeros(count)
    return SamplingMetadata(
        temperature=temperatures(generators, count), all_greedy=False, all_random=False, generators=generators,
        top_p=torch.full((count,), 0.95), top_k=torch.full((count,), 12, dtype=torch.int32), max_num_logprobs=None,
        no_penalties=True, prompt_token_ids=None, frequency_penalties=zeros, presence_penalties=zeros,
        repetition_penalties=zeros + 1, output_token_ids=[[] for _ in range(count)], allowed_token_ids_mask=None,
        bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
    )  # fmt: skip


def verification(drafts: list[list[int]]) -> Any:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    counts = [len(tokens) for tokens in drafts]
    behind = torch.tensor(counts).add(1).cumsum(0)
    rows = torch.arange(int(behind[-1]))
    return SpecDecodeMetadata(
        draft_token_ids=torch.tensor([token for tokens in drafts for token in tokens], dtype=torch.int32),
        num_draft_tokens=counts, cu_num_draft_tokens=torch.tensor(counts).cumsum(0).int(),
        cu_num_sampled_tokens=behind.int(), bonus_logits_indices=behind - 1,
        target_logits_indices=rows[~torch.isin(rows, behind - 1)], logits_indices=rows,
    )  # fmt: skip


@contextmanager
def without_llvmlite() -> Iterator[None]:
    """Hide what vLLM stumbles over while it looks through all modules, if another test has imported numba."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "llvmlite"}
    try:
        yield
    finally:
        sys.modules.update(hidden)


@pytest.fixture(autouse=True, scope="module")
def cpu_kernels() -> Iterator[None]:
    """Let vLLM's samplers run as in its CPU worker, which FASER's worker mends."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # torch warns of names that vLLM looks at
        from vllm.platforms import current_platform
        from vllm.v1.sample import rejection_sampler

        with without_llvmlite():
            current_platform.register_triton_kernel_overrides()
        patch.setattr(rejection_sampler, "expand_batch_to_tokens", v1.expand_batch_to_tokens)
        yield


def logits_of(rows: int) -> Any:
    return torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(rows)) * 2


def sampled(samplers: Any, drafts: list[list[int]] | None) -> list[list[int]]:
    """Return the tokens of one step whose other noise is always the same."""
    torch.manual_seed(0)
    rows = samplers.input_batch.num_reqs if drafts is None else sum(map(len, drafts)) + len(drafts)
    output = samplers._sample(logits_of(rows), None if drafts is None else verification(drafts))
    return [[token for token in row if token >= 0] for row in output.sampled_token_ids.tolist()]


def some_drafts() -> list[list[int]]:
    """Return drafts, of which some are what is drawn."""
    most = logits_of(sum(DRAFTED) + len(DRAFTED)).argmax(-1).tolist()
    ends = np.cumsum([count + 1 for count in DRAFTED])
    return [most[end - count - 1 : end - 1] for end, count in zip(ends, DRAFTED, strict=True)]


@pytest.mark.parametrize("has_drafts", [False, True])
def test_requests_without_a_seed_draw_as_vllm_does(has_drafts: bool) -> None:
    drafts = some_drafts() if has_drafts else None
    counts = DRAFTED if has_drafts else [0] * 5
    theirs = sampled(Samplers(counts, SEEDS), drafts)
    mine = SeededSamplers(counts, SEEDS)
    tokens = sampled(mine, drafts)
    assert mine._guard.faults == {}
    for row in (0, 2):
        assert tokens[row] == theirs[row]
    assert [tokens[row] for row in SEEDS] != [theirs[row] for row in SEEDS]


def test_a_step_without_seeds_reaches_vllm_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeededRunner, "_begin", None)
    assert sampled(SeededSamplers(DRAFTED, {}), some_drafts()) == sampled(Samplers(DRAFTED, {}), some_drafts())


def test_what_is_said_is_the_draw_at_each_position() -> None:
    """Any drafts: the draws, up to the first that no draft foretold."""
    chance = np.random.default_rng(3)
    ends = np.cumsum([count + 1 for count in DRAFTED])
    lengths = Counter[int]()
    for _ in range(200):
        drafts = [[int(token) for token in chance.integers(0, VOCABULARY, count)] for count in DRAFTED]
        for row, end in enumerate(ends):
            for column in range(DRAFTED[row]):
                if chance.random() < 0.7:
                    drafts[row][column] = expected(row, column, int(end) - DRAFTED[row] - 1 + column)
        tokens = sampled(SeededSamplers(DRAFTED, SEEDS), drafts)
        for row in SEEDS:
            start = int(ends[row]) - DRAFTED[row] - 1
            draws = [expected(row, column, start + column) for column in range(DRAFTED[row] + 1)]
            right = next((c for c, token in enumerate(drafts[row]) if token != draws[c]), DRAFTED[row])
            assert tokens[row] == draws[: right + 1]
            lengths[len(tokens[row])] += 1
    assert min(lengths[count] for count in (1, 2, 3, 4)) > 20


@cache
def expected(row: int, column: int, flat: int) -> int:
    """Return the draw of a seeded row at a position of the step."""
    logits = logits_of(sum(DRAFTED) + len(DRAFTED))[flat : flat + 1]
    key = stream_keys(torch.tensor([SEEDS.get(row, 0)]), torch.tensor([COMPUTED[row] + 1 + column]))
    return int(draw(filtered(logits), key)[0])


def filtered(logits: Any) -> Any:
    """Return a row of logits behind temperature, top-k and top-p."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    return apply_top_k_top_p(logits / 0.8, torch.tensor([12], dtype=torch.int32), torch.tensor([0.95]))


def test_draws_have_the_targets_distribution_whatever_is_drafted() -> None:
    """Many seeds, the likeliest token as draft: chi-square of the first token, and of the one behind an accepted."""
    logits = torch.full((2, VOCABULARY), -torch.inf)
    logits[0, :6], logits[1, 8:13] = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5]), torch.arange(5) / 3
    first, second = Counter[int](), Counter[int]()
    samplers = SeededSamplers([1] * 2_000, {row: row for row in range(2_000)})
    output = samplers._sample(logits.repeat(2_000, 1), verification([[0]] * 2_000))
    for token, behind in output.sampled_token_ids.tolist():
        assert (behind >= 0) == (token == 0)
        first[token] += 1
        second.update([behind] if behind >= 0 else [])
    assert second.total() > 500
    for seen, row in ((first, logits[0]), (second, logits[1])):
        assert p_value(seen, row) > 1e-4


@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_draw_that_fails_leaves_vllms_and_a_line_for_each_request(
    has_drafts: bool, monkeypatch: pytest.MonkeyPatch, vllm_log: Any
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(seeded_step, "stream_keys", fail)
    drafts, counts = (some_drafts(), DRAFTED) if has_drafts else (None, [0] * 5)
    samplers = SeededSamplers(counts, SEEDS)
    assert sampled(samplers, drafts) == sampled(Samplers(counts, SEEDS), drafts)
    samplers.input_batch.req_ids[3] = "new"
    sampled(samplers, drafts)
    assert samplers._guard.faults[seeded_step.GUARDED] >= 2
    lines = [line for line in vllm_log.getvalue().splitlines() if "could not draw by seed" in line]
    assert len(lines) == 2
    assert "what r1, r3, r4 say" in lines[0]
    assert "what new say" in lines[1]


def test_rows_inside_of_a_prompt_are_left_to_vllm() -> None:
    """What they draw is thrown away."""
    samplers = SeededSamplers([0] * 5, SEEDS)
    samplers.discard_request_mask.np[[1, 3]] = True
    theirs, mine = sampled(Samplers([0] * 5, SEEDS), None), sampled(samplers, None)
    assert [mine[row] for row in (1, 3)] == [theirs[row] for row in (1, 3)]
    key = stream_keys(torch.tensor([SEEDS[4]]), torch.tensor([COMPUTED[4] + 1]))
    assert mine[4] == draw(filtered(logits_of(5)[4:5]), key).tolist()


def test_no_generator_is_asked_to_forget_on_a_cpu() -> None:
    """A CPU's cannot; vLLM would end beside a prompt in chunks."""
    samplers = SeededSamplers([0] * 5, SEEDS)
    assert samplers._bookkeeping_sync() == []
    assert sorted(samplers.input_batch.generators) == sorted(SEEDS)


def test_vllms_samplers_are_their_own_again_behind_the_step() -> None:
    from vllm.v1.sample import rejection_sampler

    samplers, compared = SeededSamplers(DRAFTED, SEEDS), rejection_sampler.rejection_sample
    forward = samplers.sampler.topk_topp_sampler.forward
    sampled(samplers, some_drafts())
    assert samplers.sampler.topk_topp_sampler.forward == forward
    assert rejection_sampler.rejection_sample is compared
    assert "forward" not in vars(samplers.rejection_sampler)


@pytest.mark.parametrize("drafts", [None, some_drafts()], ids=["no drafts", "drafts"])
def test_where_everybody_has_a_seed_vllms_own_draws_are_spared(
    drafts: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample import rejection_sampler

    def nobody(*_: Any, **__: Any) -> Any:
        raise AssertionError("vLLM draws")

    seeds = dict(enumerate([11, -5, 12, 3, 4]))
    expected = sampled(SeededSamplers(DRAFTED, seeds), drafts)
    samplers = SeededSamplers(DRAFTED, seeds)
    samplers.sampler.topk_topp_sampler.forward = nobody
    monkeypatch.setattr(rejection_sampler, "rejection_sample", nobody)
    assert sampled(samplers, drafts) == expected
    assert not samplers._guard.faults
    # One request without a seed: the others say the same, and vLLM draws for it.
    fewer = {row: seed for row, seed in seeds.items() if row != 2}
    some = SeededSamplers(DRAFTED, fewer)
    some.sampler.topk_topp_sampler.forward = nobody
    with pytest.raises(AssertionError, match="vLLM draws"):
        sampled(some, drafts)
    monkeypatch.undo()
    mixed = sampled(SeededSamplers(DRAFTED, fewer), drafts)
    assert [mixed[row] for row in fewer] == [expected[row] for row in fewer]


@pytest.mark.parametrize("drafts", [None, some_drafts()], ids=["no drafts", "drafts"])
def test_where_everybody_has_a_seed_and_drawing_fails_vllms_draws_stand(
    drafts: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no draws")

    monkeypatch.setattr(seeded_step, "stream_keys", fail)
    samplers = SeededSamplers(DRAFTED, dict(enumerate([11, -5, 12, 3, 4])))
    said = sampled(samplers, drafts)
    assert all(len(tokens) >= 1 and all(0 <= token < VOCABULARY for token in tokens) for tokens in said)
    assert samplers._guard.faults


class OfferingSamplers(SeededSamplers):
    """Whose requests without a seed get one."""

    _seeds_all = True


def nobody(*_: Any, **__: Any) -> Any:
    raise AssertionError("vLLM draws")


def test_beside_drafts_requests_without_a_seed_get_one_and_greedy_rows_say_what_they_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.sample import rejection_sampler

    drafts = some_drafts()
    theirs, by_seed = sampled(Samplers(DRAFTED, SEEDS), drafts), sampled(SeededSamplers(DRAFTED, SEEDS), drafts)
    samplers = OfferingSamplers(DRAFTED, SEEDS)
    samplers.sampler.topk_topp_sampler.forward = nobody
    monkeypatch.setattr(rejection_sampler, "rejection_sample", nobody)
    tokens = sampled(samplers, drafts)
    assert not samplers._guard.faults
    assert [tokens[row] for row in SEEDS] == [by_seed[row] for row in SEEDS]
    assert tokens[2] == theirs[2]
    assert len(theirs[2]) == DRAFTED[2] + 1, "its draft is the likeliest token"
    key = stream_keys(torch.tensor([samplers._given["r0"]]), torch.tensor([COMPUTED[0] + 1]))
    assert tokens[0][0] == int(draw(filtered(logits_of(sum(DRAFTED) + 5)[:1]), key)[0])


def test_a_greedy_row_keeps_its_draft_up_to_the_first_that_is_not_the_likeliest() -> None:
    likeliest = logits_of(8).argmax(-1).tolist()
    for right in range(4):
        draft = [token if column < right else (token + 1) % VOCABULARY for column, token in enumerate(likeliest[4:7])]
        drafts = [[1, 2], [], draft]  # of eight rows; row 0 draws with a seed of FASER's, row 2 with the request's
        samplers = OfferingSamplers([2, 0, 3], {1: 4})
        assert sampled(samplers, drafts)[2] == likeliest[4 : 4 + right + 1]
        assert sampled(Samplers([2, 0, 3], {1: 4}), drafts)[2] == likeliest[4 : 4 + right + 1]


def test_a_request_keeps_the_seed_that_it_got_and_two_never_share_one() -> None:
    samplers = OfferingSamplers([1] * 3, {})
    batch = samplers.input_batch
    batch.random_reqs = set(batch.req_ids)
    sampled(samplers, [[1]] * 3)
    first = dict(samplers._given)
    assert len(set(first.values())) == 3
    batch.req_ids[:] = ["r2", "new", "r0"]
    batch.random_reqs = set(batch.req_ids)
    sampled(samplers, [[1]] * 3)
    assert samplers._given.keys() == {"r2", "new", "r0"}
    assert [samplers._given[name] for name in ("r0", "r2")] == [first[name] for name in ("r0", "r2")]


def test_without_drafts_vllm_draws_for_requests_without_a_seed() -> None:
    samplers = OfferingSamplers([0] * 5, {})
    assert sampled(samplers, None) == sampled(Samplers([0] * 5, {}), None)
    assert samplers._given is None


def test_drafts_drawn_at_random_are_left_to_vllms_rule_which_keeps_more_of_them() -> None:
    drafts, shares = some_drafts(), torch.full((sum(DRAFTED), VOCABULARY), 1 / VOCABULARY)
    mine, by_seed, theirs = (kind(DRAFTED, SEEDS) for kind in (OfferingSamplers, SeededSamplers, Samplers))
    for samplers in (mine, by_seed, theirs):
        samplers._draft_probs = shares
    tokens, expected = sampled(mine, drafts), sampled(theirs, drafts)
    assert not mine._guard.faults
    assert [tokens[row] for row in (0, 2)] == [expected[row] for row in (0, 2)]
    assert tokens == sampled(by_seed, drafts)
    mine._draft_probs = None
    assert sampled(mine, drafts) != tokens


def test_requests_without_a_seed_say_the_targets_distribution_whatever_is_drafted() -> None:
    """Chi-square of the first token, and of the one behind an accepted; a control that keeps each draft fails."""
    logits = torch.full((2, VOCABULARY), -torch.inf)
    logits[0, :6], logits[1, 8:13] = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5]), torch.arange(5) / 3
    torch.manual_seed(4)
    samplers = OfferingSamplers([1] * 2_000, {})
    samplers.input_batch.random_reqs = set(samplers.input_batch.req_ids)
    all_random = torch.full((2_000,), 0.8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "temperatures", lambda *_: all_random)
        output = samplers._sample(logits.repeat(2_000, 1), verification([[0]] * 2_000)).sampled_token_ids
    assert not samplers._guard.faults
    pairs = [(token, behind) for token, behind in output.tolist()]
    assert all((behind >= 0) == (token == 0) for token, behind in pairs)
    first, second = Counter(token for token, _ in pairs), Counter(behind for _, behind in pairs if behind >= 0)
    assert p_value(first, logits[0]) > 1e-4
    assert second.total() > 500
    assert p_value(second, logits[1]) > 1e-4
    assert p_value(Counter([0] * 2_000), logits[0]) < 1e-6


def p_value(seen: Counter[int], row: Any) -> float:
    """Return how likely these counts are under a row of logits."""
    shares = filtered(row[None])[0].double().softmax(-1)
    possible = shares.nonzero()[:, 0].tolist()
    assert set(seen) <= set(possible)
    return float(chisquare([seen[token] for token in possible], (shares[possible] * seen.total()).tolist()).pvalue)
