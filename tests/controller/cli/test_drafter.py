"""`faser drafter` as a user meets it: the smoke run end to end, and refusals of one line before work starts."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from faser.controller.cli.drafter import app
from faser.controller.errors import ModelError
from faser.models.embedded.eagle3 import read_card
from faser.models.embedded.pair import DRAFTER_CARD, ensure_embedded_target

BUDGET_S = 120.0  # what the help promises


def test_the_smoke_run_trains_scores_and_exports_in_under_two_minutes(tmp_path: Path) -> None:
    ensure_embedded_target()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", "from faser.controller.cli.main import main; main()", "drafter", "train", "--smoke"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "COLUMNS": "100"},
        cwd=tmp_path, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    greedy, sampled, folder = done.stdout.splitlines()
    assert greedy.startswith("T=0: ")
    assert sampled.startswith("T=0.7: ")
    assert folder.endswith("/drafter/eagle3")
    assert float(greedy.split()[1]) > 0.1, "the head drafts nothing right"
    assert list(tmp_path.glob("faser-smoke-*")) == [], "the temporary folder stayed"
    # Processor time, of one thread: other work on the machine does not count.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < BUDGET_S


def refusal(*arguments: str) -> str:
    """Return the one line that a command is refused with."""
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, ModelError), result.output
    line = str(result.exception)
    assert "\n" not in line
    return line


def recipe(folder: Path, **values: str | int) -> list[str]:
    path = folder / "recipe.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    return ["--config", str(path)]


def test_a_folder_that_is_no_target_is_refused(tmp_path: Path) -> None:
    given = recipe(tmp_path, target=str(tmp_path / "nothing"), work=str(tmp_path / "work"))
    assert "expected a folder with config.json and weights" in refusal("train", *given)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_damaged_or_foreign_head_is_refused_before_features_are_computed(tmp_path: Path, command: str) -> None:
    head = tmp_path / "head.safetensors"
    values: dict[str, str | int] = {"work": str(tmp_path / "work"), "corpus": str(tmp_path / "none.jsonl")}
    given = [str(head)] if command == "evaluate" else []
    given += recipe(tmp_path, **values, **({} if command == "evaluate" else {"initial": str(head)}))
    head.write_bytes(b"\x10\0\0\0\0\0\0\0 not a header at all")
    assert "expected a .safetensors file" in refusal(command, *given)
    save_file({"fc.weight": torch.zeros(4, 12)}, str(head))
    assert "made for another target or recipe" in refusal(command, *given)
    assert not (tmp_path / "work").exists()


def test_a_corpus_that_is_no_corpus_is_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    given = recipe(tmp_path, work=str(tmp_path / "work"), corpus=str(corpus))
    assert "expected .jsonl or .jsonl.gz" in refusal("train", *given)
    corpus.write_text('{"p": [1, 2], "g": "text"}\n')
    assert "line 1" in refusal("train", *given)


def test_the_shipped_card_says_how_the_weights_were_made() -> None:
    assert read_card(DRAFTER_CARD).kind == "drafter"
    card = json.loads(DRAFTER_CARD.read_text())
    assert card["command"] == "faser drafter train --config models/weights/drafter.recipe.toml"
    assert (DRAFTER_CARD.parents[2] / card["command"].split()[-1]).is_file()
    assert {"target", "data", "license", "seed", "first_token_agreement", "acceptance_length", "git_commit"} <= set(
        card
    )
