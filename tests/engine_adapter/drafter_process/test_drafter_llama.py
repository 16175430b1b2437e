"""The process's own Llama on a tiny random model: whatever is cached, the tokens are those of a pass from scratch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser.engine_adapter.drafter_process.attention import shape_refusal
from faser.engine_adapter.drafter_process.llama import Llama, LlamaDrafter
from faser.engine_adapter.drafter_process.mailbox import Tokens
from faser.engine_adapter.drafter_process.server import DraftTask

torch = pytest.importorskip("torch")

CONFIG = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "hidden_act": "silu",
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import save_file

    made = tmp_path_factory.mktemp("llama")
    seed = torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens": (97, 48), "model.norm": (48,)}
    for layer in range(2):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (48,), "post_attention_layernorm": (48,), "self_attn.q_proj": (48, 48),
                "self_attn.k_proj": (16, 48), "self_attn.v_proj": (16, 48), "self_attn.o_proj": (48, 48),
                "mlp.gate_proj": (64, 48), "mlp.up_proj": (64, 48), "mlp.down_proj": (48, 64),
            }.items()
        }  # fmt: skip
    weights = {f"{name}.weight": torch.randn(shape, generator=seed) * 0.6 for name, shape in shapes.items()}
    save_file(weights, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    return Llama(folder, "float32")


def textbook(folder: Path, sequence: list[int]) -> int:
    """Return the most likely next token, computed head by head and position by position."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")

    def norm(state: Any, name: str) -> Any:
        return state / (state.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights[name + ".weight"]

    def turned(state: Any, position: int) -> Any:
        pairs = torch.complex(state[:4], state[4:])
        angles = position * 10000.0 ** (-torch.arange(4) / 4)
        moved = pairs * torch.polar(torch.ones(4), angles)
        return torch.cat((moved.real, moved.imag))

    state = weights["model.embed_tokens.weight"][sequence]
    for layer in range(2):
        name = f"model.layers.{layer}"
        normed = norm(state, f"{name}.input_layernorm")
        queries, keys, values = (normed @ weights[f"{name}.self_attn.{part}_proj.weight"].T for part in "qkv")
        rows = []
        for at in range(len(sequence)):
            heads = []
            for head in range(6):
                group = slice(8 * (head // 3), 8 * (head // 3) + 8)
                query = turned(queries[at, 8 * head : 8 * head + 8], at)
                scores = torch.stack([query @ turned(keys[past, group], past) for past in range(at + 1)]) / 8**0.5
                heads.append(scores.softmax(0) @ values[: at + 1, group])
            rows.append(torch.cat(heads))
        state = state + torch.stack(rows) @ weights[f"{name}.self_attn.o_proj.weight"].T
        normed = norm(state, f"{name}.post_attention_layernorm")
        gate, up = (normed @ weights[f"{name}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        state = state + (gate * gate.sigmoid() * up) @ weights[f"{name}.mlp.down_proj.weight"].T
    logits = norm(state[-1], "model.norm") @ weights["model.embed_tokens.weight"].T
    return int(logits.argmax())


def array(tokens: list[int]) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def task(key: int, sequence: list[int], count: int) -> DraftTask:
    return DraftTask(key, array(sequence), len(sequence), count)


def test_it_computes_what_the_textbook_says(folder: Path, model: Llama) -> None:
    sequence = [5, 90, 3, 3, 41, 17, 60]
    expected: list[int] = []
    for _ in range(5):
        expected.append(textbook(folder, sequence + expected))
    drafted = LlamaDrafter(model).draft([task(1, sequence, 5)], lambda: False)[1]
    assert drafted.tokens == tuple(expected)
    assert all(0.0 < confidence <= 1.0 for confidence in drafted.confidences)


def test_what_is_cached_never_shows(model: Llama) -> None:
    """Random continuations, rejections, reading ahead, forgetting and batches, against a drafter that starts anew."""
    chance = random.Random(1)
    drafter = LlamaDrafter(model)
    texts = {key: [chance.randrange(97) for _ in range(chance.randint(1, 9))] for key in (1, 2, 3)}
    for _ in range(60):
        keys = chance.sample(list(texts), chance.randint(1, 3))
        tasks = [task(key, texts[key], chance.randint(1, 4)) for key in keys]
        found = drafter.draft(tasks, lambda: False)
        for each in tasks:
            fresh = LlamaDrafter(model).draft([each], lambda: False)[each.key]
            assert found[each.key].tokens == fresh.tokens
            assert found[each.key].confidences == pytest.approx(fresh.confidences, abs=1e-5)
            taken = found[each.key].tokens[: chance.randint(0, each.count)]
            texts[each.key] += [*taken, chance.randrange(97)]
        other = chance.choice(list(texts))
        if chance.random() < 0.3:
            drafter.forget(other)
        drafter.read(other, array(texts[other]), 2)
        if chance.random() < 0.1:
            texts[other] = texts[other][: max(1, len(texts[other]) // 2)]  # another text under the same key
    assert max(map(len, texts.values())) > 40


def test_reading_ends(model: Llama) -> None:
    drafter, sequence = LlamaDrafter(model), array(list(range(50)))
    left = [drafter.behind(1, sequence)]
    while left[-1]:
        drafter.read(1, sequence, 20)
        left.append(drafter.behind(1, sequence))
    assert left == [50, 30, 10, 0]


def test_a_cancelled_draft_is_answered_as_far_as_it_is(model: Llama) -> None:
    looks = iter([False, True])
    assert len(LlamaDrafter(model).draft([task(1, [1, 2], 9)], lambda: next(looks))[1].tokens) == 2


def test_a_cache_grows_and_old_ones_make_room(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("faser.engine_adapter.drafter_process.attention.FIRST_TOKENS", 4)
    monkeypatch.setattr(
        "faser.engine_adapter.drafter_process.attention.CACHE_LIMIT_BYTES", model.attention.cache_bytes(40)
    )
    drafter = LlamaDrafter(model)
    for key in (1, 2, 3):
        drafter.draft([task(key, list(range(15)), 6)], lambda: False)
    assert drafter.behind(1, array([0])) == 1, "the one not used for the longest time is gone"
    assert drafter.behind(3, array([0])) == 0


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"model_type": "qwen3"}, "'qwen3'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"factor": 8}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "'llama3'"),
    ],
)
def test_a_model_it_does_not_know_is_refused_in_one_line(changes: dict[str, Any], seen: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert shape_refusal(str(tmp_path)) is None
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    refusal = shape_refusal(str(tmp_path))
    assert refusal is not None
    assert seen in refusal
    assert "\n" not in refusal


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert "config.json" in (shape_refusal(str(tmp_path)) or "")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "safetensors" in (shape_refusal(str(tmp_path)) or "")
