"""Exit heads on a made-up target: training finds what the state knows, the judge counts by hand, files are checked."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from faser.engine_adapter.protocol import Prune
from faser.engine_adapter.pruning.exit_file import ExitError, ExitFacts, check_model, read_facts
from faser.engine_adapter.pruning.exit_heads import ExitHeads, load_heads
from faser.engine_adapter.pruning.verdict import Checks
from faser.env.calibration.judgement import auc
from faser.models.embedded.pair import ensure_embedded_target
from faser.models.exits.choose import (
    ExitOutcome,
    StepSeconds,
    accepted_tokens,
    best,
    ended_by,
    ending,
    judge,
    survival,
)
from faser.models.exits.export import export_heads
from faser.models.exits.record import Recording, default_layers
from faser.models.exits.train import predictions, train_heads

HIDDEN, VOCABULARY, CANDIDATES, LAYERS = 32, 64, 4, 8
SHIPPED = Path(__file__).parents[3] / "models" / "weights" / "exits.safetensors"


def recording(drafts: int, seed: int) -> Recording:
    """Return states that point to the target's choice behind layer 6, and to nothing behind layer 2."""
    draw = torch.Generator().manual_seed(seed)
    lm_head = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(VOCABULARY, (4 * drafts,), generator=draw)
    candidates = torch.randint(VOCABULARY, (4 * drafts, CANDIDATES), generator=draw)
    candidates[:, 0] = tokens
    is_accepted = torch.rand(4 * drafts, generator=draw) < 0.5
    choice = torch.where(is_accepted, tokens, candidates[:, 1])
    is_accepted = choice == tokens
    noise = torch.randn(4 * drafts, HIDDEN, generator=draw)
    return Recording(
        states={2: noise.bfloat16(), 6: (lm_head[choice] + noise).bfloat16()},
        tokens=tokens.int(),
        candidates=candidates.int(),
        confidences=torch.rand(4 * drafts, generator=draw),
        positions=torch.arange(1, 5).repeat(drafts),
        is_accepted=is_accepted,
        drafts=torch.full((drafts,), 4),
        steps=torch.zeros(0, 3, dtype=torch.float64),
        layers=LAYERS,
        lm_head=lm_head,
        norm=torch.ones(HIDDEN),
    )


@pytest.fixture(scope="module")
def learned() -> tuple[Recording, dict[int, Any]]:
    torch.set_num_threads(1)
    made = recording(1500, 0)
    return made, train_heads(made, 0, lambda done, total: None)


def test_training_finds_what_the_state_knows_and_no_more(learned: tuple[Recording, dict[int, Any]]) -> None:
    fresh = recording(400, 7)
    accepted = fresh.is_accepted.numpy()
    assert auc(predictions(fresh, 6, learned[1][6]), accepted) > 0.9
    assert 0.4 < auc(predictions(fresh, 2, learned[1][2]), accepted) < 0.6
    assert 0.4 < auc(fresh.confidences.double().numpy(), accepted) < 0.6


def model_of(recorded: Recording, layers: int = LAYERS) -> Any:
    config = SimpleNamespace(num_hidden_layers=layers, hidden_size=HIDDEN, vocab_size=VOCABULARY)
    return SimpleNamespace(lm_head=SimpleNamespace(weight=recorded.lm_head), config=config)


def test_a_written_file_says_in_the_engine_what_it_said_in_training(
    learned: tuple[Recording, dict[int, Any]], tmp_path: Path
) -> None:
    made, heads = learned
    file = tmp_path / "exits.safetensors"
    export_heads(file, heads, made, {"name": "test"}, Prune(6, 0.25))
    assert read_facts(str(file)).released == Prune(6, 0.25)
    loaded = load_heads(str(file), model_of(made))
    assert isinstance(loaded, ExitHeads)
    assert loaded.layers == (2, 6)
    assert loaded.candidates == CANDIDATES
    checks = Checks(
        made.states[6].float(), made.tokens, made.candidates.long(), made.confidences, made.positions
    )  # fmt: skip
    expected = predictions(made, 6, heads[6])
    assert np.abs(loaded.accepts(6, checks).double().numpy() - expected).max() < 0.05  # matrices in bfloat16
    assert (loaded.passes(6, 0.5, checks) == (loaded.accepts(6, checks) >= 0.5).numpy()).all()
    card = json.loads((tmp_path / "exits.card.json").read_text())
    assert card == {"name": "test", "file": "exits.safetensors", "sha256": sha256(file.read_bytes()).hexdigest()}


def test_heads_of_another_model_are_refused(learned: tuple[Recording, dict[int, Any]], tmp_path: Path) -> None:
    made, heads = learned
    file = str(tmp_path / "exits.safetensors")
    export_heads(Path(file), heads, made, {})
    with pytest.raises(ExitError, match="a model of 8 layers, hidden size 32"):
        load_heads(file, model_of(made, layers=9))
    other = recording(10, 3)
    other.lm_head = torch.randn(VOCABULARY, HIDDEN)
    with pytest.raises(ExitError, match="another model of the same shape"):
        load_heads(file, model_of(other))
    with pytest.raises(ExitError, match="expected 1 to 5"):
        check_model(file, ExitFacts((2, 6), 6, HIDDEN, VOCABULARY, 4), 6, HIDDEN, VOCABULARY)


@pytest.mark.parametrize(
    ("content", "match"),
    [(b"no tensors", "expected exit heads"), (None, "expected exit heads"), ("plain", "format None")],
)
def test_files_that_are_no_exit_heads_are_refused(content: bytes | str | None, match: str, tmp_path: Path) -> None:
    file = tmp_path / "exits.safetensors"
    if content == "plain":
        from safetensors.torch import save_file

        save_file({"a": torch.zeros(2)}, str(file))
    elif isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(ExitError, match=match):
        read_facts(str(file))


def test_an_outcome_by_hand() -> None:
    """Two drafts of three tokens; the first is accepted whole but pruned behind its second row, the second fails."""
    drafts = np.array([3, 3])
    accepted = np.array([True, True, True, True, False, True])
    predicted = np.array([0.9, 0.1, 0.9, 0.8, 0.2, 0.9])
    assert accepted_tokens(drafts, accepted).tolist() == [3, 1]
    cost = StepSeconds(1.0, 0.1, layers_share=0.5, decide_s=0.02, check_s=0.01, batch=2)
    outcome = judge(drafts, accepted, predicted, 4, 0.5, 8, cost)
    # Both lose 2 of 4 rows. The first emits its two tested tokens, no bonus, one accepted token is lost; the second 2.
    assert outcome.dropped == pytest.approx(2 / 3)
    assert outcome.wrong == pytest.approx(1 / 4)
    assert outcome.tokens_per_step == pytest.approx(2.0)
    plain_s, saved_s = 1.0 + 2 * 4 * 0.1, 2 * 2 * (0.5 * 0.5 + 0.5) * 0.1
    pruned_s = plain_s - saved_s + 0.02 + 2 * 3 * 0.01
    assert outcome.time_share == pytest.approx((pruned_s / 2.0) / (plain_s / 3.0))


def test_drafts_that_end_by_survival_by_hand() -> None:
    drafts = np.array([3, 2])
    chance = survival(drafts, np.array([0.9, 0.5, 0.9, 0.4, 1.0]))
    assert chance.tolist() == pytest.approx([0.9, 0.45, 0.405, 0.4, 0.4])
    lengths, kept = ended_by(drafts, chance, 0.42)
    assert lengths.tolist() == [2, 0]
    assert kept.tolist() == [True, True, False, False, False]
    outcome = ending(drafts, np.array([True, True, True, True, False]), chance, 0.42, StepSeconds(1.0, 0.1, batch=2))
    # 3 of 5 rows go, and 2 of 4 accepted tokens; every draft is followed by a token of the target's own.
    assert outcome.dropped == pytest.approx(3 / 5)
    assert outcome.wrong == pytest.approx(2 / 4)
    assert outcome.tokens_per_step == pytest.approx((3 + 1) / 2)
    assert outcome.time_share == pytest.approx(((1.0 + 2 * 2.0 * 0.1) / 2.0) / ((1.0 + 2 * 3.5 * 0.1) / 3.0))


def test_the_best_rule_keeps_the_ceiling() -> None:
    careful, greedy = ExitOutcome(5, 0.1, 0.2, 0.01, 2.0, 0.97), ExitOutcome(5, 0.5, 0.7, 0.2, 1.8, 0.9)
    assert best([greedy, careful]) == careful
    assert best([greedy]) is None


def test_reached_tokens_are_those_behind_accepted_ones() -> None:
    made = recording(2, 0)
    made.is_accepted = torch.tensor([True, False, True, True, True, True, True, False])
    assert made.is_reached().tolist() == [True, True, False, False, True, True, True, True]


def test_default_layers_lie_inside_the_model() -> None:
    assert default_layers(30) == (10, 15, 20, 25)
    assert all(0 < layer < 4 for layer in default_layers(4))


def test_the_shipped_heads_are_the_embedded_targets() -> None:
    facts = read_facts(str(SHIPPED))
    config = json.loads((ensure_embedded_target() / "config.json").read_text())
    check_model(str(SHIPPED), facts, config["num_hidden_layers"], config["hidden_size"], config["vocab_size"])
    card = json.loads(SHIPPED.with_suffix(".card.json").read_text())
    assert tuple(card["layers"]) == facts.layers
    assert facts.released == Prune(card["best"]["layer"], card["best"]["rule"]["threshold"])
    assert card["sha256"] == sha256(SHIPPED.read_bytes()).hexdigest()
    assert card["best"]["rule"]["wrong"] <= card["ceiling_of_wrongly_pruned"]
