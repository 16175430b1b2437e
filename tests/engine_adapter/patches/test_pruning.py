"""Pruned verification on a real engine: outputs stay what they are, whatever the exit heads say.

A tiny random Llama of six layers whose drafter is a disturbed copy; heads toss coins, or look at the token's own
value. Greedy outputs in float32 equal those without speculation; sampled ones keep the target's distribution, which
a small vocabulary lets compute exactly. test_exactness.py has the embedded pair and everything vLLM does at once.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from faser.models.embedded.pair import ensure_embedded_drafter, ensure_embedded_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

VOCABULARY, LAYERS = 64, 6
LONGEST = 5
CONTROLS = ("seq_lens", "slots", "bonus", "logits", "positions")


def tiny_model(folder: Path, noise: float, family: str = "Llama") -> Path:
    """Save a random model; `noise` disturbs the weights that every call shares."""
    import transformers

    model_class = getattr(transformers, f"{family}ForCausalLM")
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(5)
    model = model_class(getattr(transformers, f"{family}Config")(**config)).float().eval()
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    with torch.no_grad():
        for weight in matrices:
            weight.normal_(0, 1.3 * weight.shape[1] ** -0.5)
        for weight in matrices:
            weight += noise * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder)
    plain = config | {"architectures": [model_class.__name__], "model_type": family.lower(), "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(plain | {"hidden_act": "silu"}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the target's and the drafter's folder."""
    return tiny_model(tmp_path_factory.mktemp("target"), 0.0), tiny_model(tmp_path_factory.mktemp("drafter"), 0.05)


def engine_arguments(drafter: Path, longest: int, **named: Any) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "seed": 11,
        "speculative_config": {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": longest},
    } | named


def with_heads(
    target: Path, arguments: dict[str, Any], batches: list[dict[str, Any]], layers: list[int], kind: str = "coin"
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what `engine` takes: an engine that is steered and has heads of this kind behind these layers."""
    exits = {"layers": layers, "kind": kind}
    asked = {"model": str(target), "is_steered": True, "engine": arguments, "batches": batches, "exits": exits}
    return asked, {"FASER_EXIT_HEADS": kind}


def test_greedy_outputs_stay_the_same_whatever_is_pruned(
    engine: Callable[..., Any], folders: tuple[Path, Path]
) -> None:
    """Mixed lengths, chunked prompts beside drafts, prefix hits and preemption, under random cuts at every layer."""
    target, drafter = folders
    words = [(7 * place * place + 3 * place) % VOCABULARY for place in range(400)]
    prompts = [words[start : start + 5 + 13 * start] for start in range(16)]
    prompts += [prompt + words[:4] for prompt in prompts[10:]]
    sampling = {"temperature": 0.0, "max_tokens": 40, "logprobs": 1, "presence_penalty": 0.5}
    prune = {"layers": list(range(1, LAYERS)), "thresholds": [0.0, 0.2, 0.5, 1.0], "seed": 4}
    batches: list[dict[str, Any]] = [
        {"prompts": prompts, "sampling": sampling, "rule": {"random": LONGEST, "seed": 3}, "prune": prune}
        for _ in ("", *CONTROLS, "failure")
    ]
    for batch, control in zip(batches, ("", *CONTROLS, "failure"), strict=True):
        batch["broken_cut"] = control
    batches.insert(0, {"prompts": prompts, "sampling": sampling, "rule": {"cycle": [0]}})
    arguments = engine_arguments(
        drafter, LONGEST, max_model_len=384, max_num_seqs=12, max_num_batched_tokens=96, num_gpu_blocks_override=20
    )
    seen = engine(*with_heads(target, arguments, batches, list(range(1, LAYERS))))
    reference, pruned, *broken, failed = [batch.tokens for batch in seen.batches]
    assert pruned == reference
    assert failed == reference
    assert seen.is_pruning is False  # after the failure, and not before:
    steps = seen.batches[1].steps
    assert all(any(any(step.pruned) for step in batch.steps) for batch in seen.batches[1:-1])
    assert not any(any(step.pruned) for step in seen.batches[-1].steps)
    # The comparison is worth something only if all of this happened.
    assert sum(len(step.handles) for step in steps if any(step.pruned)) > 200
    rows = [
        (verified, gone, sampled)
        for step in steps
        if step.pruned
        for verified, gone, sampled in zip(step.verified, step.pruned, step.sampled, strict=True)
    ]
    assert {gone for _, gone, _ in rows} == set(range(LONGEST + 1))
    assert sum(gone > 0 and sampled > verified - gone > 0 for verified, gone, sampled in rows) > 5  # no bonus
    assert any(max(step.scheduled) > LONGEST + 1 and any(step.pruned) for step in steps)  # chunks beside cuts
    for name, tokens in zip(CONTROLS, broken, strict=True):
        assert tokens != reference, f"nobody noticed {name}"


@pytest.mark.parametrize("family", [*(pytest.param(f, marks=pytest.mark.slow) for f in ("Mistral", "Qwen2")), "Qwen3"])
def test_greedy_outputs_of_other_models_stay_the_same(engine: Callable[..., Any], tmp_path: Path, family: str) -> None:
    """Every family that is let in, cut behind each of its layers; and a control of each."""
    target, drafter = tiny_model(tmp_path / "target", 0.0, family), tiny_model(tmp_path / "drafter", 0.05, family)
    prompts = [[(7 * place * place + 3 * start) % VOCABULARY for place in range(5 + 9 * start)] for start in range(8)]
    common = {"prompts": prompts, "sampling": {"temperature": 0.0, "max_tokens": 24}}
    prune = {"layers": list(range(1, LAYERS)), "thresholds": [0.2, 0.5, 1.0], "seed": 4}
    steered = common | {"rule": {"random": LONGEST, "seed": 3}, "prune": prune}
    batches = [common | {"rule": {"cycle": [0]}}, steered, steered | {"broken_cut": "slots"}]
    arguments = engine_arguments(
        drafter, LONGEST, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks_override=20
    )
    seen = engine(*with_heads(target, arguments, batches, list(range(1, LAYERS))))
    reference, pruned, broken = [batch.tokens for batch in seen.batches]
    assert pruned == reference
    assert seen.is_pruning
    assert sum(gone > 0 for step in seen.batches[1].steps for gone in step.pruned) > 50
    assert broken != reference


def low_reading(drafter: Path, folder: Path) -> Path:
    """Return a copy of an EAGLE-3 head that reads low layers: it was not trained on those, and drafts badly."""
    shutil.copytree(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    low = {"eagle_aux_hidden_state_layer_ids": [2, 5, 8]}
    (folder / "config.json").write_text(
        json.dumps(config | low | {"eagle_config": config.get("eagle_config", {}) | low})
    )
    return folder


def drafts_by_place(batch: Any) -> dict[tuple[int, int], list[int]]:
    """Return what was drafted by request and tokens emitted before."""
    found, emitted = {}, Counter[int]()
    for step in batch.steps:
        for handle, drafts, sampled in zip(step.handles, step.drafts, step.sampled, strict=True):
            if drafts:
                found[handle, emitted[handle]] = drafts
            emitted[handle] += sampled
    first = min(handle for handle, _ in found)
    return {(handle - first, place): drafts for (handle, place), drafts in found.items()}


def share_alike(one: dict[tuple[int, int], list[int]], other: dict[tuple[int, int], list[int]]) -> tuple[int, float]:
    """Return at how many places both drafted, and at which share of them the same, as far as both went."""
    places = one.keys() & other.keys()
    alike = sum(all(a == b for a, b in zip(one[place], other[place], strict=False)) for place in places)
    return len(places), alike / max(len(places), 1)


@pytest.mark.parametrize("reads", ["as trained", pytest.param("low layers", marks=pytest.mark.slow)])
def test_an_eagle_head_reads_true_states_whatever_was_cut(
    engine: Callable[..., Any], tmp_path: Path, reads: str
) -> None:
    """Cuts below, between, at and above the layers that it reads: its drafts are those of an engine that cuts nothing.

    Outputs could not show it: a head that reads wrong states drafts other tokens, which the target then rejects.
    """
    drafter = ensure_embedded_drafter()
    drafter = drafter if reads == "as trained" else low_reading(drafter, tmp_path / "low")
    layers = [1, 3, 10, 16, 20, 28]  # it was trained on the states behind 3, 16 and 30
    prompts = [[1 + (31 * place * place + 7 * start) % 4000 for place in range(6 + 5 * start)] for start in range(6)]
    common = {"prompts": prompts, "sampling": {"temperature": 0.0, "max_tokens": 48}, "rule": {"cycle": [4]}}
    prune = {"layers": layers, "thresholds": [0.3, 0.6], "seed": 4}
    batches = [common, common | {"prune": prune}, common | {"prune": prune, "broken_cut": "auxiliary"}]
    arguments = engine_arguments(drafter, 4, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=96)
    arguments["speculative_config"]["method"] = "eagle3"
    seen = engine(*with_heads(ensure_embedded_target(), arguments, batches, layers))
    whole, cut, broken = seen.batches
    assert whole.tokens == cut.tokens == broken.tokens
    assert sum(gone > 0 for step in cut.steps for gone in step.pruned) > 50
    accepted, verified = whole.acceptance()
    assert (accepted > 0.27 * verified) == (reads == "as trained")
    true = drafts_by_place(whole)
    places, alike = share_alike(true, drafts_by_place(cut))
    assert places > 60
    assert alike > 0.97  # rows of another batch are rounded otherwise
    assert share_alike(true, drafts_by_place(broken))[1] < 0.8


# --- sampling ---

PROMPT = [3, 9, 27, 11, 3, 9]
REQUESTS, MANY_REQUESTS = 4_000, 20_000
EMITTED, TESTED, DRAFTED, TOP_K = 4, 3, 3, 4
TEMPERATURES = (0.7, 1.0)
LEAST_EXPECTED = 8.0  # cells below it are pooled


def exact(target: Path, temperature: float) -> dict[tuple[int, ...], float]:
    """Return the probability of every sequence of TESTED tokens that top-k lets through."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target).float().eval()
    paths: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TESTED):
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *path] for path in paths])).logits[:, -1] / temperature
        best = logits.topk(TOP_K)
        shares = best.values.softmax(-1)
        paths = {
            (*path, int(best.indices[row, rank])): probability * float(shares[row, rank])
            for (row, (path, probability)), rank in product(enumerate(paths.items()), range(TOP_K))
        }
    return paths


def p_value(tokens: list[list[list[int]]], expected: dict[tuple[int, ...], float]) -> float:
    """Return the probability of a sample at least as odd as this one; 0 if a token is impossible."""
    seen = Counter(tuple(sample[:TESTED]) for request in tokens for sample in request)
    total = sum(seen.values())
    if set(seen) - set(expected):
        return 0.0
    large = [path for path, share in expected.items() if share * total >= LEAST_EXPECTED]
    shares = [expected[path] for path in large] + [1.0 - sum(expected[path] for path in large)]
    counts = [seen[path] for path in large] + [total - sum(seen[path] for path in large)]
    if shares[-1] * total < LEAST_EXPECTED:
        shares[-2:], counts[-2:] = [sum(shares[-2:])], [sum(counts[-2:])]
    return float(chisquare(counts, [share / sum(shares) * total for share in shares]).pvalue)


@pytest.mark.parametrize(
    ("sample_method", "requests"),
    [
        ("probabilistic", REQUESTS),
        pytest.param("greedy", MANY_REQUESTS, marks=pytest.mark.slow),
        pytest.param("probabilistic", MANY_REQUESTS, marks=pytest.mark.slow),
    ],
)
def test_pruning_by_the_drawn_token_leaves_the_distribution_alone(
    engine: Callable[..., Any], folders: tuple[Path, Path], sample_method: str, requests: int
) -> None:
    """The heads let even tokens pass only: a token's own value decides what becomes of the tokens behind it."""
    target, drafter = folders
    is_drawn = sample_method == "probabilistic"
    batches = [
        {
            "prompts": [PROMPT] * requests,
            "sampling": {"temperature": temperature, "top_k": TOP_K, "max_tokens": EMITTED},
            "rule": {"random": DRAFTED, "seed": 3},
            "prune": {"layers": [1, 3], "thresholds": [0.5], "seed": 4},
            "broken_cut": control,
        }
        for temperature, control in zip((*TEMPERATURES, 0.7), ("", "", "naive") if is_drawn else ("", ""), strict=False)
    ]
    arguments = engine_arguments(drafter, DRAFTED, max_model_len=64, max_num_seqs=250, max_num_batched_tokens=2048)
    arguments["speculative_config"]["draft_sample_method"] = sample_method
    seen = engine(*with_heads(target, arguments, batches, [1, 3], "parity"))
    assert seen.is_pruning
    # The gate hears of every step that could be pruned, and of nothing else.
    assert len(seen.gate) > 5  # most steps have prompts beside them
    assert all(has_pruned and time_s > 0 and tokens >= requests for requests, has_pruned, time_s, tokens in seen.gate)
    for run, temperature in zip(seen.batches, TEMPERATURES, strict=False):
        assert sum(sum(step.pruned) for step in run.steps) > requests // 4
        assert len(run.tokens) == requests
        assert p_value(run.tokens, exact(target, temperature)) > 1e-4
    for control in seen.batches[2:]:
        assert p_value(control.tokens, exact(target, 0.7)) < 1e-6
