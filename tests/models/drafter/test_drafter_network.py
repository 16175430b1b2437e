"""The head in training equals the head in drafting: packing, unrolling and loss, on a tiny head with random weights."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from faser.models.drafter.evaluate import draft_chains, judge_confidence
from faser.models.drafter.features import Example
from faser.models.drafter.network import Batch, DraftHead, HeadShape, pack
from faser.models.drafter.recipe import Recipe
from faser.models.drafter.train import InFloat32, Trainer, leading_cross_entropy, teacher_shares

HIDDEN, VOCABULARY, AUX = 32, 50, 3
SHAPE = HeadShape(
    hidden_size=HIDDEN, heads=4, kv_heads=2, head_size=8, intermediate_size=48, aux_layers=AUX, rope_theta=1e4,
    norm_epsilon=1e-5,
)  # fmt: skip


def head(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> DraftHead:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.2
        for name, size in SHAPE.parameters().items()
    }
    return DraftHead(SHAPE, weights, torch.randn(VOCABULARY, HIDDEN, generator=generator).to(torch.bfloat16).to(dtype))


def example(length: int, prompt: int, seed: int) -> Example:
    generator = torch.Generator().manual_seed(seed)
    return Example(
        tokens=torch.randint(0, VOCABULARY, (length,), generator=generator, dtype=torch.int32),
        prompt_tokens=prompt,
        temperature=0.0,
        aux=torch.randn(length, AUX * HIDDEN, generator=generator).to(torch.bfloat16),
        top_tokens=torch.zeros(length - prompt, 2, dtype=torch.int16),
        top_logits=torch.zeros(length - prompt, 2, dtype=torch.bfloat16),
    )


def packed(*examples: Example) -> Batch:
    return pack(examples, torch.device("cpu"))


def test_the_first_row_predicts_the_answers_second_token() -> None:
    one = example(12, 5, 1)
    batch = packed(one)
    assert batch.rows == 12 - 5 - 1
    assert batch.labels.tolist() == one.tokens[6:].tolist()
    assert batch.inputs[batch.row_contexts].tolist() == one.tokens[5:-1].tolist()


def test_conversations_in_one_batch_do_not_see_each_other() -> None:
    first, second = example(14, 4, 1), example(11, 6, 2)
    together = list(head().unroll(packed(first, second), 3))
    alone = list(head().unroll(packed(second), 3))
    for depth in range(3):
        mine = together[depth][first.tokens.shape[0] - 1 - 4 :]
        assert torch.allclose(mine[depth:].float(), alone[depth][depth:].float(), atol=0.05)


def test_in_float32_the_head_gives_what_it_gives_in_bfloat16() -> None:
    batch = packed(example(14, 4, 1))
    both = zip(head().unroll(batch, 3), head(dtype=torch.float32).unroll(batch, 3), strict=True)
    for depth, (half, full) in enumerate(both):
        assert (half.dtype, full.dtype) == (torch.bfloat16, torch.float32)
        assert torch.allclose(half[depth:].float(), full[depth:], atol=0.1)  # of 3 at most; eight bits are kept
    other = next(head(1, torch.float32).unroll(batch, 1))
    assert not torch.allclose(other, next(head(dtype=torch.float32).unroll(batch, 1)), atol=1.0)


def test_muon_in_float32_does_what_it_does_in_bfloat16() -> None:
    start, gradient = torch.randn(2, 24, 16, generator=torch.Generator().manual_seed(0))
    moved = []
    for mode in (nullcontext(), InFloat32()):
        matrix = torch.nn.Parameter(start.clone())
        matrix.grad = gradient.clone()
        muon = torch.optim.Muon([matrix], lr=0.1)
        with mode:
            muon.step()
        moved.append(matrix.detach() - start)
    assert torch.allclose(moved[0], moved[1], atol=0.05 * float(moved[1].abs().max()))
    assert not torch.equal(moved[0], moved[1])  # bfloat16 rounds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_trainer_keeps_muon_to_the_type_of_the_head(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, orthogonal = [], torch.optim._muon._zeropower_via_newtonschulz

    def noted(*arguments: Any) -> torch.Tensor:
        seen.append(orthogonal(*arguments))
        return seen[-1]

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", noted)
    cache: Any = SimpleNamespace(addresses=[SimpleNamespace(length=14)], read=lambda _: example(14, 4, 1))
    drafter = head(dtype=dtype)
    trainer = Trainer(Recipe(batch_tokens=14), drafter, drafter.embedding, torch.arange(VOCABULARY), cache, cache)
    trainer.step()
    assert {update.dtype for update in seen} == {dtype}
    assert len(seen) == len(drafter.matrices())


def plain_attention(drafter: DraftHead, one: Example, start: int, level: int) -> torch.Tensor:
    """Draft as an engine does, one index at a time: true states up to `start`, then the head's own."""
    weights = {name: parameter.detach() for name, parameter in drafter.parameters.items()}
    fused = one.aux.float() @ weights["fc.weight"].T
    features = [fused[index] for index in range(start + 1)]
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    output = torch.empty(0)
    for index in range(start + level + 1):
        feature = features[index]
        embedded = drafter.embedding[int(one.tokens[index + 1])].float()
        mixed = torch.cat([rms(embedded), rms(feature)])
        attention = "midlayer.self_attn."
        keys.append(rotated((weights[attention + "k_proj.weight"] @ mixed).view(2, 8), index))
        values.append((weights[attention + "v_proj.weight"] @ mixed).view(2, 8))
        queries = rotated((weights[attention + "q_proj.weight"] @ mixed).view(4, 8), index)
        heads = []
        for number in range(4):
            scores = torch.stack([queries[number] @ key[number // 2] for key in keys]) / 8**0.5
            heads.append(sum(s * v[number // 2] for s, v in zip(scores.softmax(0), values, strict=True)))
        state = feature + weights[attention + "o_proj.weight"] @ torch.cat([torch.as_tensor(h) for h in heads])
        inner, mlp = rms(state), "midlayer.mlp."
        gate = torch.nn.functional.silu(weights[mlp + "gate_proj.weight"] @ inner)
        state = state + weights[mlp + "down_proj.weight"] @ (gate * (weights[mlp + "up_proj.weight"] @ inner))
        if index >= start:
            features.append(state)
        output = rms(state)
    return output


def rms(values: torch.Tensor) -> torch.Tensor:
    return values * torch.rsqrt(values.square().mean() + 1e-5)


def rotated(states: torch.Tensor, position: int) -> torch.Tensor:
    angles = position * 1e4 ** -(torch.arange(0, 8, 2) / 8)
    cosine, sine = angles.cos().repeat(2), angles.sin().repeat(2)
    return states * cosine + torch.cat([-states[:, 4:], states[:, :4]], 1) * sine


def test_unrolling_equals_drafting_token_by_token() -> None:
    drafter, one = head(), example(13, 5, 3)
    unrolled = list(drafter.unroll(packed(one), 3))
    for level in range(3):
        for start in (4, 6, 8):  # index 4 is the answer's first draft
            served = plain_attention(drafter, one, start, level)
            mine = unrolled[level][start - 4 + level].float()
            assert (mine - served).norm() / served.norm() < 0.05


def test_chains_count_only_drafts_whose_first_tokens_all_hit() -> None:
    drafter, one = head(), example(40, 5, 4)
    vocabulary = torch.arange(VOCABULARY)
    batch = packed(one)
    rows = torch.arange(batch.rows)
    tokens = torch.stack(
        [(states.float() @ drafter.embedding.float().T).argmax(-1) for states in drafter.unroll(batch, 3)]
    )
    # Every third chain is right throughout, but every other one of these has its first token spoiled.
    labels = (tokens[rows % 3, rows] + (rows % 6 == 0)) % VOCABULARY
    batch = dataclasses.replace(batch, labels=labels)
    drafted = [level == labels for level in tokens]
    levels = draft_chains(drafter, drafter.embedding, vocabulary, batch, 3)
    hits = [int(level.hit.sum()) for level in levels]
    expected = [0, 0, 0]
    for row in range(batch.rows - 2):
        chain = True
        for level in range(3):
            chain = chain and bool(drafted[level][row + level])
            expected[level] += chain
    assert [len(level.hit) for level in levels] == [batch.rows - 2] * 3
    assert torch.equal(levels[1].was_alive, levels[0].hit)
    assert hits == pytest.approx(expected, abs=1)  # bfloat16 may break a tie
    assert 3 <= expected[2] <= batch.rows // 4, "the chains are not as they were laid out"


def test_confidence_is_judged_by_order_and_by_size() -> None:
    accepted = np.array([True, True, False, False])
    perfect = judge_confidence(np.array([0.95, 0.95, 0.05, 0.05]), accepted)
    assert perfect.auc == 1.0
    assert perfect.calibration_error == pytest.approx(0.05)
    blind = judge_confidence(np.array([0.9, 0.9, 0.9, 0.9]), accepted)
    assert blind.auc == 0.5
    assert blind.calibration_error == pytest.approx(0.4)
    assert (blind.tested, blind.rejected) == (4, 2)


def test_the_loss_gradient_equals_autograds() -> None:
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(600, HIDDEN, generator=generator).to(torch.bfloat16).requires_grad_()
    table = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(torch.bfloat16)
    tokens = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:4] for _ in range(600)])
    shares = teacher_shares(torch.randn(600, 4, generator=generator), 0.8)
    weights = (torch.arange(600) % 3 > 0).float()
    loss = leading_cross_entropy(states, table, tokens, shares, weights)
    (gradient,) = torch.autograd.grad(loss, states)
    exact = states.detach().float().requires_grad_()
    log_guess = (exact @ table.float().T).log_softmax(-1)
    reference = -((shares * log_guess.gather(1, tokens)).sum(1) * weights).sum()
    (expected,) = torch.autograd.grad(reference, exact)
    assert float(loss.detach()) == pytest.approx(float(reference.detach()), rel=0.01)
    assert (gradient.float() - expected).norm() / expected.norm() < 0.02
