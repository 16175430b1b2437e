"""`faser evaluate --pipeline` prints a table, writes JSON and a picture, and refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from faser.controller.cli.main import app
from faser.controller.errors import FaserError
from faser.controller.pipeline.picture import MARKS, OTHERS
from faser.models.pipeline.names import DEFAULT

SHORT = ["evaluate", "--pipeline", "--minutes", "1", "--traces", "gamma-2", "--seeds", "2"]


def test_the_table_the_json_and_the_picture_tell_the_same(tmp_path: Path) -> None:
    output = tmp_path / "pipeline.json"
    result = CliRunner().invoke(app, [*SHORT, "--policies", "static:4 flexpipe", "-o", str(output)])
    assert result.exit_code == 0, result.output
    saved = json.loads(output.read_text())
    row = saved["loads"]["gamma-2"]["flexpipe"]
    assert f"{row['mean_s']['mean']:.3f}" in result.output
    assert f"{row['fixed']['latency_ratio']:.3f}" in result.output
    assert set(saved["loads"]["gamma-2"]) == {"static:4", "flexpipe"}
    assert len(saved["fixed_sets"]["gamma-2"]) == 26
    assert saved["command"].startswith("faser")
    assert {"machine", "versions", "commit"} <= set(saved)
    picture = output.with_suffix(".svg").read_text()
    assert "gamma-2" in picture
    assert "flexpipe" in picture


def test_policies_of_the_default_table_have_marks_of_their_own() -> None:
    judged = [name for name in DEFAULT if not name.startswith(("static:", "reactive:"))]
    assert len({MARKS[name] for name in judged} | {OTHERS}) == len(judged) + 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--policies", "static:5"], "static:5"),
        (["--policies", "sometimes"], "sometimes"),
        (["--traces", "gamma-2,nowhere"], "nowhere"),
        (["--minutes", "0.5"], "--minutes 0.5"),
        (["-o", "/no/such/folder/x.json"], "/no/such/folder"),
    ],
)
def test_what_cannot_be_judged_is_refused_in_one_line(arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(app, [*SHORT, *arguments])
    assert isinstance(result.exception, FaserError)
    assert named in str(result.exception)
    assert "\n" not in str(result.exception)
