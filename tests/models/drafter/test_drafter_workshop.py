"""From recipe to exported head on a tiny random target: refusals, cache, resume, export."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from faser.controller.cli.drafter import stops
from faser.env.workload.held_out import is_training_prompt
from faser.models.drafter import pipeline as workshop_module
from faser.models.drafter.corpus import ChatFormat
from faser.models.drafter.drafter_error import DrafterError
from faser.models.drafter.export import export_drafter, quantised
from faser.models.drafter.initial_weights import read_own_weights
from faser.models.drafter.pipeline import Workshop, open_workshop, train_drafter
from faser.models.drafter.recipe import Recipe, make_recipe, read_recipe
from faser.models.drafter.train import TrainingReport

WORDS = 60
TEMPLATE = "{% for m in messages %}<u> {{ m.content }} <e> {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 3 layers and 64 words whose greedy answers are its own."""
    folder = tmp_path_factory.mktemp("target")
    write_tokenizer(folder)
    write_model(folder, "llama")
    return folder


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<s>", "<u>", "<e>", "<a>", *[f"w{number}" for number in range(WORDS)]]
    tokenizer = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)
    fast.save_pretrained(str(folder))


def write_model(folder: Path, kind: str, is_tied: bool = True) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": is_tied,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    model: Any = (
        LlamaForCausalLM(LlamaConfig(**sizes)) if kind == "llama" else MistralForCausalLM(MistralConfig(**sizes))
    )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    model.to(torch.bfloat16).save_pretrained(str(folder))


@pytest.fixture(scope="module")
def corpus(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(target))
    model: Any = AutoModelForCausalLM.from_pretrained(str(target), dtype=torch.bfloat16)
    chat = ChatFormat.of(tokenizer)
    lines = []
    for number in range(60):
        turn = " ".join(f"w{(number * step) % WORDS}" for step in range(1, 5))
        ids = tokenizer(chat.wrap(turn))["input_ids"]
        answer: list[int] = []
        for _ in range(24):
            with torch.no_grad():
                answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
        lines.append(json.dumps({"p": ids, "g": answer, "T": 0.7 if number % 2 else 0, "source": "self"}))
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def recipe(target: Path, corpus: Path, work: Path, **changes: object) -> Recipe:
    values: dict[str, object] = {
        "target": str(target),
        "corpus": str(corpus),
        "work": str(work),
        "draft_vocabulary": 40,
        "teacher_top": 8,
        "minimum_response_tokens": 100,
        "evaluation_conversations": 4,
        "evaluation_depth": 3,
        "tokens": 1600,
        "batch_tokens": 120,
        "warmup_steps": 2,
    }
    return make_recipe(values | changes, "test")


def quiet(*_: object) -> None:
    """Show nothing."""


def opened(target: Path, corpus: Path, work: Path, **changes: object) -> Workshop:
    return open_workshop(recipe(target, corpus, work, **changes), quiet)


def test_an_interrupted_run_ends_with_the_same_weights(target: Path, corpus: Path, tmp_path: Path) -> None:
    whole = opened(target, corpus, tmp_path / "whole").trainer()
    whole.run(tmp_path / "whole" / "checkpoint.pt", quiet)
    workshop = opened(target, corpus, tmp_path / "parts")
    first = workshop.trainer()

    while first.position.step < 5:
        first.step()
    first.save(workshop.checkpoint)
    second = opened(target, corpus, tmp_path / "parts").trainer()
    assert second.position.step == 5
    second.run(workshop.checkpoint, quiet)
    assert second.position.step == whole.position.step
    for name, weight in whole.head.weights().items():
        assert torch.equal(weight, second.head.weights()[name]), name


def test_ctrl_c_leaves_a_checkpoint_from_which_the_same_command_ends_with_the_same_weights(
    target: Path, corpus: Path, tmp_path: Path
) -> None:
    whole = opened(target, corpus, tmp_path / "whole").trainer()
    whole.run(tmp_path / "whole" / "checkpoint.pt", quiet)
    workshop = opened(target, corpus, tmp_path / "parts", report_s=0.0)
    first = workshop.trainer()

    def interrupt(report: TrainingReport) -> None:
        if report.position.step == 5 and not first.stop_asked:
            os.kill(os.getpid(), signal.SIGINT)

    with stops(first):
        train_drafter(workshop, first, interrupt, "faser drafter train")
    assert first.position.step == 5
    again = opened(target, corpus, tmp_path / "parts")
    second = again.trainer()
    assert second.position.step == 5
    train_drafter(again, second, quiet, "faser drafter train")
    for name, weight in whole.head.weights().items():
        assert torch.equal(weight, second.head.weights()[name]), name


def test_training_lowers_the_loss_and_exports_what_vllm_loads(target: Path, corpus: Path, tmp_path: Path) -> None:
    workshop = opened(target, corpus, tmp_path, tokens=6000)
    trainer = workshop.trainer()
    first = sum(trainer.step() for _ in range(3))
    folder = train_drafter(workshop, trainer, quiet, "faser drafter train")
    assert sum(trainer.step() for _ in range(3)) < first
    tensors = load_file(str(folder / "model.safetensors"))
    assert tensors["lm_head.weight"].shape == (40, 32)
    rows = torch.arange(40) + tensors["d2t"]
    assert torch.equal(tensors["lm_head.weight"], workshop.embedding[rows])
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == 40
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(workshop.aux_layers)
    card = json.loads((folder.parent / "drafter.card.json").read_text())
    assert card["command"] == "faser drafter train"
    assert card["answer_tokens_seen"] >= 6000


def test_only_the_training_side_is_trained_on(target: Path, corpus: Path, tmp_path: Path) -> None:
    workshop = opened(target, corpus, tmp_path)
    tokenizer: Any = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(target))
    chat = ChatFormat.of(tokenizer)
    for cache, wanted in ((workshop.train, True), (workshop.held_out, False)):
        assert cache.addresses
        for address in cache.addresses:
            one = cache.read(address)
            assert one.aux.dtype == one.top_logits.dtype == torch.bfloat16  # whatever the target was computed in
            turn = chat.unwrap(tokenizer.decode(one.tokens[: one.prompt_tokens].tolist()))
            assert turn is not None
            assert is_training_prompt(turn) is wanted


def test_answers_are_cut_to_the_longest_wanted(target: Path, corpus: Path, tmp_path: Path) -> None:
    workshop = opened(target, corpus, tmp_path, longest_answer=10)
    assert {address.answer_length for address in workshop.train.addresses} == {10}
    assert {address.answer_length for address in workshop.held_out.addresses} == {24}


def test_quantised_weights_read_back_within_a_step(target: Path, corpus: Path, tmp_path: Path) -> None:
    workshop = opened(target, corpus, tmp_path)
    weights = workshop.fresh_head().weights()
    save_file(quantised(weights, workshop.vocabulary, 3), str(tmp_path / "own.safetensors"))
    back = read_own_weights(tmp_path / "own.safetensors", workshop.shape)
    for name, weight in weights.items():
        step = weight.abs().amax(-1, keepdim=True) / 127
        assert bool(((back[name] - weight).abs() <= 0.51 * step + 0.004 * weight.abs()).all()), name


def test_an_untied_targets_own_lm_head_is_exported(target: Path, corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "untied"
    other.mkdir()
    write_model(other, "llama", is_tied=False)
    lm_head = load_file(str(other / "model.safetensors"))["lm_head.weight"]
    workshop = opened(target, corpus, tmp_path / "work")
    weights = workshop.fresh_head().weights()
    folder = export_drafter(
        tmp_path / "out",
        other,
        weights,
        workshop.vocabulary,
        {"kind": "drafter", "method": "eagle3", "target": "t", "license": "l"},
        (1, 2, 3),
    )
    rows = load_file(str(folder / "model.safetensors"))["lm_head.weight"]
    assert torch.equal(rows, lm_head[workshop.vocabulary])


def test_another_architecture_is_refused(target: Path, corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "mistral"
    other.mkdir()
    write_tokenizer(other)
    write_model(other, "mistral")
    with pytest.raises(DrafterError, match="architecture 'mistral'; expected a Llama-family"):
        opened(other, corpus, tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_corpus_of_another_model_is_refused(target: Path, corpus: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in corpus.read_text().splitlines()]
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text("\n".join(json.dumps(row | {"g": [(t + 7) % 64 for t in row["g"]]}) for row in rows))
    with pytest.raises(DrafterError, match="written by another model"):
        opened(target, foreign, tmp_path / "work")
    foreign.write_text("\n".join(json.dumps(row | {"p": row["p"][1:]}) for row in rows))
    with pytest.raises(DrafterError, match="not in the target's chat format"):
        opened(target, foreign, tmp_path / "work")
    foreign.write_text(json.dumps(rows[0] | {"g": [64] * 20}))
    with pytest.raises(DrafterError, match="outside the target's vocabulary of 64"):
        opened(target, foreign, tmp_path / "work")


def test_too_little_data_is_refused(target: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="expected 50000 or more"):
        opened(target, corpus, tmp_path / "work", minimum_response_tokens=50_000)


def test_corrupt_and_foreign_heads_are_refused(target: Path, corpus: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"\x10\0\0\0\0\0\0\0 not a header at all")
    with pytest.raises(DrafterError, match=r"expected a \.safetensors file"):
        opened(target, corpus, tmp_path / "work", initial=str(bad))
    save_file({"fc.weight": torch.zeros(4, 12)}, str(bad))
    with pytest.raises(DrafterError, match="made for another target or recipe"):
        opened(target, corpus, tmp_path / "work", initial=str(bad))


def test_a_full_disk_is_refused_before_the_cache_is_filled(
    target: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage(10, 9, 1000))
    with pytest.raises(DrafterError, match=r"needs .* GB"):
        opened(target, corpus, tmp_path)
    assert not list(tmp_path.rglob("part-*"))


def test_a_full_disk_is_refused_before_text_is_generated(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage(10, 9, 1000))
    monkeypatch.setattr(workshop_module, "generate_corpus", lambda *_: pytest.fail("work has started"))
    with pytest.raises(DrafterError, match=r"needs 1\.\d GB"):
        open_workshop(make_recipe({"target": str(target), "work": str(tmp_path)}, "test"), quiet)


def test_too_little_space_for_all_features_is_refused_before_any_is_computed(
    target: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Enough for the held-out features, which come first, not for those to train on.
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage(10**6, 0, 200_000))
    with pytest.raises(DrafterError, match=r"needs .* GB"):
        opened(target, corpus, tmp_path)
    assert not list(tmp_path.rglob("part-*"))


def test_a_cache_of_another_recipe_is_refused(target: Path, corpus: Path, tmp_path: Path) -> None:
    opened(target, corpus, tmp_path)
    with pytest.raises(DrafterError, match="choose another `work` folder"):
        opened(target, corpus, tmp_path, teacher_top=4)


def test_a_checkpoint_of_another_recipe_is_refused(target: Path, corpus: Path, tmp_path: Path) -> None:
    workshop = opened(target, corpus, tmp_path)
    workshop.trainer().save(workshop.checkpoint)
    with pytest.raises(DrafterError, match="of another recipe"):
        opened(target, corpus, tmp_path, matrix_rate=0.1).trainer()
    workshop.checkpoint.write_bytes(b"half a zip")
    with pytest.raises(DrafterError, match="it is damaged"):
        opened(target, corpus, tmp_path).trainer()


def test_a_recipe_with_an_unknown_or_wrong_setting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("tokens = 10\nlearning_rate = 3\n")
    with pytest.raises(DrafterError, match="unknown setting 'learning_rate'"):
        read_recipe(path)
    path.write_text('tokens = "many"\n')
    with pytest.raises(DrafterError, match="tokens = 'many': expected int"):
        read_recipe(path)
    path.write_text("matrix_rate = 1\ndepths = [1, 2]\n")
    assert read_recipe(path, {"tokens": 7}).tokens == 7


def test_the_schedule_warms_up_holds_and_falls() -> None:
    schedule = Recipe(warmup_steps=10, flat_share=0.5, final_rate=0.1)
    assert schedule.rate_at(0, 0.0) == pytest.approx(0.1)
    assert schedule.rate_at(100, 0.5) == pytest.approx(1.0)
    assert schedule.rate_at(100, 0.75) == pytest.approx(0.5)
    assert schedule.rate_at(100, 1.0) == pytest.approx(0.1)
    assert [schedule.depth_at(share) for share in (0.0, 0.44, 0.46, 1.0)] == [1, 1, 3, 3]
