"""Ragged drafting on a real vLLM: the same tokens as without speculation, drafts as good as vLLM's own, fewer rows."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from faser.engine_adapter.drafting.draft_notes import ConfidenceBook
from faser.engine_adapter.protocol import StopRule
from faser.engine_adapter.steering.stop_rule import kept_tokens
from faser.models.embedded.pair import ensure_embedded_drafter, ensure_embedded_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LONGEST = 6
CYCLE = {"cycle": [0, 1, 2, 3, 4, 5, 6, 2]}  # one length per prompt, the same in every batch of the eight
RANDOM = {"random": LONGEST, "seed": 7}
UNIFORM = {"cycle": [3]}
RANDOM_STOP = {"seed": 13}
RULE = StopRule([1.0], [0.0], [0.3, 0.2], [0.4, 0.3])
STOP = {"rule": [RULE.slopes, RULE.intercepts, RULE.keep, RULE.go_on]}
# Prompts longer than a step's budget are computed in chunks beside requests that already draft.
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}


def prompts(seed: int) -> list[list[int]]:
    """Return token ids of eight requests; half of them repeat themselves, so that ngram finds something."""
    chance = random.Random(seed)
    random_ones = [[chance.randrange(1000, 9000) for _ in range(n)] for n in (5, 17, 90, 130)]
    repeating = [[chance.randrange(1000, 9000) for _ in range(n)] * 4 for n in (3, 6, 12, 20)]
    return [prompt for pair in zip(random_ones, repeating, strict=True) for prompt in pair]


PROMPTS = prompts(1)


def batch(rule: dict[str, Any] = CYCLE, control: str = "", stop: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"prompts": PROMPTS, "sampling": GREEDY, "rule": rule, "control": control, "stop": stop}


def scenario(method: dict[str, Any], *batches: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": str(ensure_embedded_target()),
        "is_steered": True,
        "engine": {**ENGINE, "speculative_config": {"num_speculative_tokens": LONGEST, **method}},
        "batches": list(batches),
    }


@pytest.fixture(scope="module")
def reference(engine: Callable[..., Any]) -> list[list[list[int]]]:
    """Return what plain vLLM says without speculation."""
    plain = {"model": str(ensure_embedded_target()), "is_steered": False, "engine": ENGINE, "batches": [batch()]}
    tokens: list[list[list[int]]] = engine(plain).batches[0].tokens
    return tokens


@pytest.fixture(scope="module")
def self_drafting(engine: Callable[..., Any]) -> Any:
    """The target drafts for itself: it must be right every time, whoever left the batch before."""
    rules_and_controls = [
        (CYCLE, ""),
        (RANDOM, ""),
        ({"cycle": [0]}, ""),
        (CYCLE, "positions"),
        (CYCLE, "rows"),
    ]
    method = {"method": "draft_model", "model": str(ensure_embedded_target())}
    batches = [batch(*pair) for pair in rules_and_controls]
    return engine(scenario(method, *batches, batch(UNIFORM), batch(CYCLE, stop=STOP), batch(RANDOM, stop=RANDOM_STOP)))


@pytest.fixture(scope="module")
def truncated_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a drafter made of the target's first three layers."""
    source, folder = ensure_embedded_target(), tmp_path_factory.mktemp("truncated")
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    weights = load_file(source / "model.safetensors")
    kept = {n: w for n, w in weights.items() if not n.startswith("model.layers.") or int(n.split(".")[2]) < 3}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).symlink_to(source / name)
    return folder


def assert_honoured(steps: list[Any]) -> None:
    """Each request drafted at most its length, and what it verifies is what it drafted."""
    drafted: dict[int, int] = {}
    for step in steps:
        for handle, length, verified, produced in zip(
            step.handles, step.lengths, step.verified, step.drafted, strict=True
        ):
            assert produced <= length
            assert verified <= drafted.get(handle, 0)
            drafted[handle] = produced


def test_the_target_as_its_own_drafter_is_always_right(self_drafting: Any, reference: Any) -> None:
    for number in (0, 1):
        run = self_drafting.batches[number]
        accepted, verified = run.acceptance()
        assert run.tokens == reference
        assert accepted == verified > 80
        assert_honoured(run.steps)
    assert self_drafting.faults == {}
    assert self_drafting.is_ragged


def test_a_request_leaves_the_draft_batch_after_its_own_length(self_drafting: Any) -> None:
    seen_ragged = 0
    for step in self_drafting.batches[0].steps:
        drafting = [k for k, tokens in zip(step.lengths, step.sampled, strict=True) if tokens]
        if min(step.lengths) < max(step.lengths) and any(drafting):
            expected = [sum(length > column for length in drafting) for column in range(max(drafting))]
            assert step.rounds == expected
            seen_ragged += len(expected) > 1
    assert seen_ragged > 5


def test_lengths_of_zero_draft_nothing(self_drafting: Any, reference: Any) -> None:
    run = self_drafting.batches[2]
    assert run.tokens == reference
    assert all(not any(step.drafted) and not any(step.verified) and not step.rounds for step in run.steps)


def test_prompt_chunks_and_drafts_share_steps(self_drafting: Any) -> None:
    def is_mixed(step: Any) -> bool:
        chunk = any(not tokens and not k for tokens, k in zip(step.sampled, step.verified, strict=True))
        return chunk and any(step.verified)

    assert sum(is_mixed(step) for step in self_drafting.batches[0].steps) >= 2


def test_every_phase_is_timed(self_drafting: Any) -> None:
    for step in self_drafting.batches[0].steps:
        verify_s, sample_s, draft_s, runner_s = step.times_s
        assert min(verify_s, sample_s, draft_s) > 0
        assert verify_s + sample_s + draft_s < runner_s


def test_control_a_drafter_that_does_not_advance_is_seen(self_drafting: Any, reference: Any) -> None:
    run = self_drafting.batches[3]
    accepted, verified = run.acceptance()
    assert run.tokens == reference, "bad drafts cost speed, never tokens"
    assert accepted < 0.9 * verified


def test_control_drafts_in_foreign_rows_are_seen(self_drafting: Any, reference: Any) -> None:
    run = self_drafting.batches[4]
    accepted, verified = run.acceptance()
    assert run.tokens == reference
    assert accepted < 0.5 * verified


def test_control_accepting_every_draft_corrupts_outputs(truncated: Any, reference: Any) -> None:
    assert truncated.batches[2].tokens != reference


def test_confidences_are_the_drafters_probabilities_of_its_top_tokens(self_drafting: Any, reference: Any) -> None:
    """The drafter is the target here, always right, so one forward pass of another library knows them all."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(ensure_embedded_target(), dtype=torch.float32).eval()
    expected = []
    for prompt, (said,) in zip(PROMPTS, reference, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 :]
        expected.append(logits.softmax(-1).max(-1).values)  # entry i: of the token said after i others
    for number in (0, 5, 6):  # ragged, uniform, stopped
        said_tokens, seen = dict.fromkeys(range(1, 9), 0), 0
        for step in self_drafting.batches[number].steps:
            for handle, sampled, confidences in zip(step.handles, step.sampled, step.confidences, strict=True):
                request = (handle - 1) % len(PROMPTS) + 1
                said_tokens[request] += sampled
                if said_tokens[request] == GREEDY["max_tokens"]:
                    continue  # it may have sampled more, and drafted behind that
                known = expected[request - 1][said_tokens[request] :][: len(confidences)]
                assert confidences[: len(known)] == pytest.approx(known.tolist(), abs=2e-4)
                seen += len(known)
        assert seen > 60


def test_every_token_handed_over_has_its_confidence(self_drafting: Any) -> None:
    for run in self_drafting.batches[:6]:
        assert all([len(row) for row in step.confidences] == step.drafted for step in run.steps)


def test_a_token_that_a_stop_rule_dropped_is_reported_with_its_confidence(self_drafting: Any) -> None:
    dropped = 0
    for run in self_drafting.batches[6:]:
        for step in run.steps:
            known = [len(row) for row in step.confidences]
            assert sum(step.rounds) == sum(known), "every token drawn is known"
            assert all(drafted <= seen <= drafted + 1 for drafted, seen in zip(step.drafted, known, strict=True))
            dropped += sum(known) - sum(step.drafted)
    assert dropped > 20


def test_a_stop_rule_ends_drafts_and_saves_draft_work(self_drafting: Any, reference: Any) -> None:
    free, stopped, random_rules = (self_drafting.batches[number] for number in (0, 6, 7))
    for run in (stopped, random_rules):
        accepted, verified = run.acceptance()
        assert run.tokens == reference
        assert accepted == verified > 20
        assert_honoured(run.steps)
    cut = 0
    for step in stopped.steps:
        for length, drafted, confidences in zip(step.lengths, step.drafted, step.confidences, strict=True):
            assert drafted <= length
            assert kept_tokens(RULE, confidences) == drafted
            cut += drafted < length
    assert cut > 30
    assert tokens_per_round(stopped) < 0.8 * tokens_per_round(free)
    assert any(sorted(step.rounds, reverse=True) == step.rounds and len(step.rounds) < 6 for step in stopped.steps)


def tokens_per_round(run: Any) -> float:
    """Return drafted tokens, dropped ones included, for each token that was allowed."""
    allowed = sum(k for step in run.steps for k, n in zip(step.lengths, step.sampled, strict=True) if n)
    return float(sum(sum(step.rounds) for step in run.steps if any(step.lengths))) / allowed


@pytest.mark.slow  # an engine for one switch: `make proof`
def test_confidence_can_be_switched_off(engine: Callable[..., Any], reference: Any) -> None:
    method = {"method": "draft_model", "model": str(ensure_embedded_target())}
    seen = engine(scenario(method, batch(CYCLE, stop=STOP)), {"FASER_CONFIDENCE": "0"})
    run = seen.batches[0]
    assert run.tokens == reference
    assert all(step.confidences == [] for step in run.steps)
    assert all(
        drafted in (0, length) for step in run.steps for drafted, length in zip(step.drafted, step.lengths, strict=True)
    ), "without confidence no rule can stop a draft"


@pytest.fixture(scope="module")
def truncated(engine: Callable[..., Any], truncated_target: Path) -> Any:
    method = {"method": "draft_model", "model": str(truncated_target)}
    stopped = batch(RANDOM, stop=RANDOM_STOP)
    return engine(scenario(method, batch(), stopped, batch(CYCLE, "acceptance"), batch(CYCLE, "failure", STOP)))


def test_a_bad_drafter_changes_nothing(truncated: Any, reference: Any) -> None:
    for run in truncated.batches[:2]:
        assert run.tokens == reference
        assert_honoured(run.steps)
        assert run.acceptance()[1] > 40


def test_after_a_failure_of_ours_vllms_own_drafting_goes_on(truncated: Any, reference: Any) -> None:
    run = truncated.batches[3]
    assert run.tokens == reference
    assert truncated.is_ragged is False
    assert_honoured(run.steps)
    assert run.acceptance()[1] > 80
    assert any(any(row) for step in run.steps for row in step.confidences), "confidences survive the failure"


def test_ngram_searches_only_where_it_may_draft(engine: Callable[..., Any], reference: Any) -> None:
    method = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    seen = engine(scenario(method, batch(), batch(RANDOM)))
    assert seen.drafter == "RaggedNgramProposer"
    for run in seen.batches:
        accepted, verified = run.acceptance()
        assert run.tokens == reference
        assert_honoured(run.steps)
        assert 0 < accepted < verified


def test_an_eagle_head_drafts_raggedly_what_it_drafts_uniformly(engine: Callable[..., Any], reference: Any) -> None:
    method = {"method": "eagle3", "model": str(ensure_embedded_drafter())}
    batches = [batch(RANDOM), batch(), batch(CYCLE, "uniform"), batch(CYCLE, "positions")]
    # Without catching up: it gives the last token of a prompt's chunk its true successor, which vLLM does not.
    vllms_first_pass = {"FASER_CATCH_UP_TOKENS": "0"}
    batches += [batch(RANDOM, stop=RANDOM_STOP), batch(CYCLE, stop=STOP)]
    seen = engine(scenario(method, *batches), vllms_first_pass)
    assert seen.drafter == "RaggedEagleProposer"
    assert seen.faults == {}
    _, ragged, uniform, broken, _, stopped = seen.batches  # the first one fills the prefix cache
    for run in seen.batches:
        assert run.tokens == reference
        assert_honoured(run.steps)
    assert ragged.acceptance() == uniform.acceptance()
    assert [step.sampled for step in ragged.steps] == [step.sampled for step in uniform.steps]
    assert broken.acceptance() != uniform.acceptance()
    assert ragged.acceptance()[0] > 10
    for one, other in zip(ragged.steps, uniform.steps, strict=True):
        for confidences, alike in zip(one.confidences, other.confidences, strict=True):
            # Uniform drafting also draws, and tells of, the token behind the last one handed over.
            assert len(confidences) <= len(alike) <= len(confidences) + 1
            assert confidences == pytest.approx(alike[: len(confidences)], abs=1e-4)
    assert sum(len(confidences) for step in ragged.steps for confidences in step.confidences) > 100
    accepted, verified = stopped.acceptance()
    assert accepted / verified > 1.5 * ragged.acceptance()[0] / ragged.acceptance()[1]


def greedily(target: Path, prompts: list[list[int]]) -> list[list[list[int]]]:
    """Return what another library says, without speculation."""
    from transformers import LlamaForCausalLM

    model, texts = LlamaForCausalLM.from_pretrained(target).float().eval(), [list(prompt) for prompt in prompts]
    for text in texts:
        for _ in range(GREEDY["max_tokens"]):
            with torch.no_grad():
                text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return [[text[len(prompt) :]] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.parametrize(
    ("catch_up_tokens", "is_caught_up"), [("256", True), pytest.param("0", False, marks=pytest.mark.slow)]
)
def test_an_eagle_1_head_drafts_raggedly_and_changes_nothing(
    engine: Callable[..., Any],
    eagle_pair: Callable[[str], tuple[Path, Path]],
    catch_up_tokens: str,
    is_caught_up: bool,
) -> None:
    """A tiny random target, whose head is right about as often as not."""
    target, head = eagle_pair("eagle")
    given = scenario({"method": "eagle", "model": str(head)}, batch(RANDOM), batch(), batch(CYCLE, "uniform"))
    given["batches"] += [batch(CYCLE, "positions"), batch(RANDOM, stop=RANDOM_STOP), batch(CYCLE, "acceptance")]
    given |= {"model": str(target)}
    given["engine"] |= {"skip_tokenizer_init": True}
    for one in given["batches"]:
        one["prompts"] = [[token % 64 for token in prompt] for prompt in PROMPTS]
    reference = greedily(target, given["batches"][0]["prompts"])
    seen = engine(given, {"FASER_CATCH_UP_TOKENS": catch_up_tokens})
    assert seen.drafter == "RaggedEagleProposer"
    assert seen.faults == {}
    mixed, ragged, uniform, broken, _, accepting = seen.batches
    for run in seen.batches[:-1]:
        assert run.tokens == reference
        assert_honoured(run.steps)
    assert accepting.tokens != reference, "nobody would notice drafts that are taken unverified"
    for run in (mixed, ragged):
        accepted, verified = run.acceptance()
        assert 0.1 * verified < accepted < 0.9 * verified
        assert {k for step in run.steps for k in step.verified} == set(range(LONGEST + 1))
        assert sum(len({*step.verified}) > 2 for step in run.steps) > 5
    assert any(step.caught_up for step in mixed.steps) == is_caught_up
    if not is_caught_up:
        assert ragged.acceptance() == uniform.acceptance() != broken.acceptance()
        assert [step.sampled for step in ragged.steps] == [step.sampled for step in uniform.steps]


def test_greedy_by_maximum_is_argmax_over_bfloat16() -> None:
    from faser.engine_adapter.drafting.ragged import RaggedModelDrafter

    class Drafter(RaggedModelDrafter):
        use_local_argmax_reduction = use_heterogeneous_vocab = False

        class model:
            @staticmethod
            def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
                return hidden

    logits = torch.randn(16, 999, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens = Drafter().greedy_tokens(logits, lambda hidden: pytest.fail("the slow way"))
    assert torch.equal(logits.gather(1, tokens[:, None])[:, 0], logits.max(-1).values)


def test_a_head_with_a_vocabulary_of_its_own_is_read_before_its_logits_are_spread() -> None:
    from faser.engine_adapter.drafting.ragged import RaggedModelDrafter

    spread = torch.tensor([0, 3, 4, 9])  # target ids of the draft vocabulary

    class Drafter(RaggedModelDrafter):
        use_local_argmax_reduction = use_heterogeneous_vocab = False

        class model:
            draft_id_to_target_id = spread - torch.arange(4)
            lm_head = None

            @staticmethod
            def logits_processor(head: None, hidden: torch.Tensor) -> torch.Tensor:
                return hidden

    drafter = Drafter()
    drafter.book = ConfidenceBook()
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    tokens = drafter.greedy_tokens(logits, lambda hidden: pytest.fail("the slow way"))
    wide = torch.full((5, 10), -torch.inf).index_copy(1, spread, logits)
    assert torch.equal(tokens, wide.argmax(-1))
    assert drafter.book.newest() == pytest.approx(wide.softmax(-1).max(-1).values.tolist())


def test_confidences_are_read_back_row_by_row() -> None:
    book = ConfidenceBook()
    assert book.read([0, 2]) == [(), ()]
    book.note([0, 1, 3], torch.tensor([0.5, 0.25, 0.75]))
    book.note([0, 3], torch.tensor([0.125, 0.0625]))
    # The first row lost its second token to a stop rule: its confidence is told all the same.
    assert book.read([1, 1, 0, 2]) == [(0.5, 0.125), (0.25,), (), (0.75, 0.0625)]
