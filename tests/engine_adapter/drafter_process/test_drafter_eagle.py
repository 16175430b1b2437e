"""The process's own EAGLE-3 head on tiny random weights: whatever is cached, tokens are those of a drafter anew.

That it computes what vLLM's head computes is test_frontier_engine.py's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser.engine_adapter.drafter_process.drafted import Drafted
from faser.engine_adapter.drafter_process.eagle import EagleDrafter, EagleHead, eagle_refusal, states_width
from faser.engine_adapter.drafter_process.mailbox import StateRows, Tokens
from faser.engine_adapter.drafter_process.server import DraftTask
from faser.engine_adapter.drafter_process.target_states import TargetStates

torch = pytest.importorskip("torch")

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "hidden_act": "silu",
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False, "draft_vocab_size": 31, "fc_norm": True,
    "eagle_config": {"use_aux_hidden_state": True},
}  # fmt: skip
WIDTH = 3 * 48
BLOCK_TOKENS, BLOCKS = 4, 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A head and the target whose embedding it shares."""
    from safetensors.torch import save_file

    head, target = (tmp_path_factory.mktemp(name) for name in ("head", "target"))
    seed = torch.Generator().manual_seed(3)
    shapes = {
        "fc": (48, WIDTH), "fc_norm.0": (48,), "fc_norm.1": (48,), "fc_norm.2": (48,), "norm": (48,),
        "lm_head": (31, 48), "midlayer.input_layernorm": (48,), "midlayer.hidden_norm": (48,),
        "midlayer.post_attention_layernorm": (48,), "midlayer.self_attn.q_proj": (48, 96),
        "midlayer.self_attn.k_proj": (16, 96), "midlayer.self_attn.v_proj": (16, 96),
        "midlayer.self_attn.o_proj": (48, 48), "midlayer.mlp.gate_proj": (64, 48), "midlayer.mlp.up_proj": (64, 48),
        "midlayer.mlp.down_proj": (48, 64),
    }  # fmt: skip
    weights = {f"{name}.weight": torch.randn(shape, generator=seed) * 0.4 for name, shape in shapes.items()}
    save_file(weights | {"d2t": 2 * torch.arange(31)}, head / "model.safetensors")
    save_file({"model.embed_tokens.weight": torch.randn(97, 48, generator=seed)}, target / "model.safetensors")
    (head / "config.json").write_text(json.dumps(CONFIG))
    return head, target


@pytest.fixture(scope="module")
def head(folders: tuple[Path, Path]) -> EagleHead:
    return EagleHead(*folders, "float32")


class Target:
    """States that follow from a token, the one before it and its place; each request has blocks of its own."""

    def __init__(self) -> None:
        self.states = TargetStates.create(BLOCKS, BLOCK_TOKENS, WIDTH, "float32")
        self._vectors = torch.randn(97, WIDTH, generator=torch.Generator().manual_seed(5))

    def told(self, key: int, sequence: list[int], count: int) -> StateRows:
        """Write the states of a request's first tokens, and say where they are."""
        blocks = np.arange(key * 16, key * 16 + self.states.blocks_of(count), dtype=np.int32)
        tokens, before = torch.tensor(sequence[:count]), torch.tensor([0, *sequence[: count - 1]])
        rows = self._vectors[tokens] + 0.5 * self._vectors[before] + 0.01 * torch.arange(count)[:, None]
        self.states.keep(torch.arange(key * 64, key * 64 + count), list(rows.chunk(3, dim=1)))
        return StateRows(count, self.states.writes, blocks)


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.states.close()


def array(tokens: list[int]) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def drafted(
    drafter: EagleDrafter, target: Target, texts: dict[int, tuple[list[int], list[int]]], count: int
) -> dict[int, Drafted]:
    """Return what is drafted behind texts and chunks, one after the other told and then all at once."""
    for key, (text, chunk) in texts.items():
        assert drafter.learn(key, array(text + chunk), target.told(key, text, len(text) - 1))
    tasks = [DraftTask(key, array(text + chunk), len(text), count) for key, (text, chunk) in texts.items()]
    return drafter.draft(tasks, lambda: False)


def assert_same(seen: Drafted, expected: Drafted) -> None:
    assert seen.tokens == expected.tokens
    assert seen.confidences == pytest.approx(expected.confidences, abs=1e-5)


def test_drafting_ahead_goes_on_as_if_it_had_not_stopped(head: EagleHead, target: Target) -> None:
    drafter, text = EagleDrafter(head, target.states), [3, 14, 15, 92, 65, 35]
    whole = drafted(EagleDrafter(head, target.states), target, {1: (text, [])}, 8)[1]
    first = drafted(drafter, target, {1: (text, [])}, 3)[1]
    assert_same(drafted(drafter, target, {1: (text, list(first.tokens))}, 5)[1], whole.behind(3))
    assert set(whole.tokens) <= set(range(0, 93, 3)), "d2t: token ids of the target"


def test_own_states_are_replaced_by_the_targets(head: EagleHead, target: Target) -> None:
    """The negative control is in the second half: own states would have gone on otherwise."""
    drafter, text = EagleDrafter(head, target.states), [3, 14, 15, 92, 65, 35]
    chain = drafted(drafter, target, {1: (text, [])}, 6)[1]
    longer = text + list(chain.tokens[:3])
    again = drafted(drafter, target, {1: (longer, [])}, 3)[1]
    assert_same(again, drafted(EagleDrafter(head, target.states), target, {1: (longer, [])}, 3)[1])
    assert again.confidences != pytest.approx(chain.behind(3).confidences, abs=1e-3)


def test_what_is_cached_never_shows(head: EagleHead, target: Target) -> None:
    """Random chunks, rejections, reading ahead, forgetting and batches, against a drafter that starts anew."""
    chance = random.Random(1)
    drafter = EagleDrafter(head, target.states)
    texts = {key: [chance.randrange(97) for _ in range(chance.randint(2, 9))] for key in (0, 1, 2)}
    for _ in range(60):
        keys = chance.sample(list(texts), chance.randint(1, 3))
        asked = {key: (texts[key], [chance.randrange(97)] * chance.choice((0, 0, 1, 3))) for key in keys}
        count = chance.randint(1, 4)
        found = drafted(drafter, target, asked, count)
        for key in keys:
            anew = EagleDrafter(head, target.states)
            assert_same(found[key], drafted(anew, target, {key: asked[key]}, count)[key])
            taken = found[key].tokens[: chance.randint(0, count)] if not asked[key][1] else ()
            texts[key] = [*texts[key], *taken, chance.randrange(97)][:60]
        other = chance.choice(list(texts))
        if chance.random() < 0.3:
            drafter.forget(other)
        if chance.random() < 0.2:
            texts[other] = texts[other][: max(2, len(texts[other]) // 2)]  # another text under the same key
        if chance.random() < 0.3:
            text = texts[other]
            assert drafter.learn(other, array(text), target.told(other, text, len(text) - 1))
            drafter.read(other, array(text), min(2, drafter.behind(other, array(text))))
    assert max(map(len, texts.values())) > 30


def test_states_that_are_gone_are_no_draft(head: EagleHead, target: Target) -> None:
    drafter, text = EagleDrafter(head, target.states), array([3, 14, 15, 92])
    told = target.told(1, text.tolist(), 3)
    target.states.clear()
    assert not drafter.learn(1, text, told)
    assert drafter.behind(1, text) == 0


def test_a_cancelled_draft_is_answered_as_far_as_it_is(head: EagleHead, target: Target) -> None:
    drafter, text = EagleDrafter(head, target.states), array([3, 14, 15])
    assert drafter.learn(1, text, target.told(1, text.tolist(), 2))
    looks = iter([False, False, True])
    assert len(drafter.draft([DraftTask(1, text, 3, 9)], lambda: next(looks))[1].tokens) == 2
    assert drafter.draft([DraftTask(1, text, 3, 9)], lambda: True) == {}


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"norm_output": True}, "norm_output is True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config"),
        ({"attention_bias": True}, "attention_bias is True"),
    ],
)
def test_a_head_it_does_not_know_is_refused_in_one_line(
    changes: dict[str, Any], seen: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    head, target = map(str, folders)
    assert eagle_refusal(head, target) is None
    assert states_width(head) == WIDTH
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    (tmp_path / "model.safetensors").symlink_to(folders[0] / "model.safetensors")
    refusal = eagle_refusal(str(tmp_path), target)
    assert refusal is not None
    assert seen in refusal
    assert "\n" not in refusal


def test_a_target_without_its_embedding_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    assert "model.embed_tokens.weight" in (eagle_refusal(str(folders[0]), str(tmp_path)) or "")
