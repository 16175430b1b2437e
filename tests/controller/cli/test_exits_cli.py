"""`faser exits train` as a user meets it: what it refuses, and heads of the embedded pair from recording to file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from faser.engine_adapter.pruning.exit_file import read_facts


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from faser.controller.cli.main import main; main()", "exits", "train", *arguments]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (("--target", "somewhere"), "target and drafter belong together"),
        (("--method", "ngram"), "method 'ngram': it drafts without likely candidates"),
        (("--layers", "ten"), "layers 'ten': expected numbers such as 10,15,20"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path: Path, arguments: tuple[str, ...], seen: str) -> None:
    done = train("--output", str(tmp_path / "heads.safetensors"), *arguments)
    assert done.returncode == 6
    assert seen in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine
@pytest.mark.slow  # `make proof`; models/exits has the same on recorded states
@pytest.mark.timeout(900)
def test_heads_are_recorded_trained_judged_and_written(tmp_path: Path) -> None:
    output = tmp_path / "heads.safetensors"
    done = train("--output", str(output), "--layers", "10,25", "--tokens", "1000", "--longest", "3")
    assert done.returncode == 0, done.stderr[-3000:]
    *table, path = done.stdout.splitlines()
    assert path == str(output)
    assert [line.split(":")[0].split()[-1] for line in table if line.startswith("layer")] == ["10", "25"]
    facts = read_facts(str(output))
    assert set(facts.layers) <= {10, 25}
    assert (facts.target_layers, facts.hidden_size) == (30, 576)
    card = json.loads(output.with_suffix(".card.json").read_text())
    assert all(0.5 < layer["auc"] <= 1.0 for layer in card["by_layer"])
    assert card["judged_tokens"] > 100


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_layer_that_the_target_lacks_is_refused(tmp_path: Path) -> None:
    done = train("--output", str(tmp_path / "heads.safetensors"), "--layers", "10,30", "--tokens", "1000")
    assert done.returncode == 6
    assert "layers (10, 30): the target has 30; expected 1 to 29" in done.stderr
    assert list(tmp_path.iterdir()) == []
