"""Pruned verification on a real engine: outputs stay what they are, whatever the exit heads say.

A tiny random Llama of six layers whose drafter is a disturbed copy; heads toss coins, or look at the token's own
value. Greedy outputs in float32 equal those without speculation; sampled ones keep the target's distribution, which
a small vocabulary lets compute exactly. test_exactness.py has the embedded pair and everything vLLM does at once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

VOCABULARY, LAYERS = 64, 6
LONGEST = 5
CONTROLS = ("seq_lens", "slots", "bonus", "logits", "positions")


def tiny_llama(folder: Path, noise: float) -> Path:
    """Save a random Llama; `noise` disturbs the weights that every call shares."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    with torch.no_grad():
        for weight in matrices:
            weight.normal_(0, 1.3 * weight.shape[1] ** -0.5)
        for weight in matrices:
            weight += noise * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder)
    plain = config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(plain | {"hidden_act": "silu"}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the target's and the drafter's folder."""
    return tiny_llama(tmp_path_factory.mktemp("target"), 0.0), tiny_llama(tmp_path_factory.mktemp("drafter"), 0.05)


def engine_arguments(drafter: Path, longest: int, **named: Any) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "seed": 11,
        "speculative_config": {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": longest},
    } | named


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
    seen = engine(
        {
            "model": str(target), "is_steered": True, "engine": arguments, "batches": batches,
            "exits": {"layers": list(range(1, LAYERS)), "kind": "coin"},
        },
        {"FASER_EXIT_HEADS": "coins"},
    )  # fmt: skip
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
    seen = engine(
        {
            "model": str(target), "is_steered": True, "engine": arguments, "batches": batches,
            "exits": {"layers": [1, 3], "kind": "parity"},
        },
        {"FASER_EXIT_HEADS": "parity"},
    )  # fmt: skip
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
