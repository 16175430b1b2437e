"""The simulator's figures: what is measured again replaces its part of the file and no other; bad input is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def fidelity(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("fidelity")


PRUNED = ["--pruned-survey", "one.sqlite", "--pruned-survey", "two.sqlite", "--pruned", "a.sqlite"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to fit; expected SURVEY or the survey of a mechanism"),
        (["survey.sqlite", "--run", "a.sqlite"], "--run and --repeat go together"),
        (
            ["--run", "a.sqlite", "--repeat", "b.sqlite", *PRUNED, "--pruned-repeat", "b.sqlite"],
            "SURVEY; none is given",
        ),
        (PRUNED, "--pruned-survey, --pruned and --pruned-repeat go together"),
        (["survey.sqlite", "--ahead-level", "c.sqlite"], "--ahead-survey, --ahead and --ahead-repeat go together"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str], said: str, fidelity: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        fidelity.main(arguments)
    assert said in capsys.readouterr().err


def test_a_new_profile_leaves_the_mechanisms_in_the_file(
    fidelity: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fidelity, "told", lambda *_: {"verify": 1})
    monkeypatch.setattr(fidelity, "published", dict)
    file = tmp_path / "fidelity.json"
    file.write_text(json.dumps({"closed_loop": "old", "pruned": "kept"}))
    fidelity.main(["one.sqlite", "two.sqlite", "--json", str(file)])
    found = json.loads(file.read_text())
    assert (found["pruned"], found["surveys"], found["calibration"]) == ("kept", 2, {"verify": 1})
    assert found["closed_loop"] is None  # a replay through another profile says nothing about this one


def test_a_mechanism_replaces_its_own_part_of_the_file(
    fidelity: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def told(*arguments: object) -> dict[str, Any]:
        asked.append(tuple(map(str, arguments)))
        return {"verify": 1, "draft": 2, "exits": [3], "ahead": None, "levels": {}, "tpot_error": 0.1}

    monkeypatch.setattr(fidelity, "told", told)
    file = tmp_path / "fidelity.json"
    file.write_text(json.dumps({"closed_loop": "kept", "ahead": "kept", "pruned": "old"}))
    fidelity.main([*PRUNED, "--pruned-repeat", "b.sqlite", "--json", str(file)])
    found = json.loads(file.read_text())
    assert (found["closed_loop"], found["ahead"]) == ("kept", "kept")
    assert found["pruned"]["calibration"] == {"verify": 1, "draft": 2, "exits": [3]}
    assert found["pruned"]["closed_loop"]["tpot_error"] == 0.1
    assert asked[0][:3] == ("calibrate", "one.sqlite", "two.sqlite")
    assert asked[-1][:2] == ("fidelity", "a.sqlite")
    assert asked[-1][-2:] == ("--repeat", "b.sqlite")


def test_a_profile_that_drafts_ahead_ships_beside_the_one_without(
    fidelity: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*arguments: object) -> dict[str, Any]:
        if "-o" in arguments:
            Path(str(arguments[arguments.index("-o") + 1])).write_text(str(arguments[-1]))
        return {"verify": 1, "draft": 2, "ahead": {"ready": 0.5}, "levels": {}}

    monkeypatch.setattr(fidelity, "told", told)
    ahead = ["--ahead-survey", "one.sqlite", "--ahead", "a.sqlite", "--ahead-repeat", "b.sqlite"]
    files = ["--json", str(tmp_path / "fidelity.json"), "--profile", str(tmp_path / "pair.json")]
    fidelity.main([*ahead, *files])
    assert (tmp_path / "pair_ahead.json").read_text() == "embedded_ahead"  # the name it was given
    assert not (tmp_path / "pair.json").exists()
    assert json.loads((tmp_path / "fidelity.json").read_text())["ahead"]["calibration"]["ahead"] == {"ready": 0.5}
