"""`faser policy`: what a policy does at each load, as a user asks for it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from faser.controller.cli.evaluate import drawn, explained
from faser.controller.cli.main import app
from faser.controller.cli.policy import _in_short
from faser.controller.errors import FaserError, UsageError
from faser.env.spaces import Capabilities
from faser.models.evaluation.portrait import portray
from faser.models.evaluation.worlds import held_out
from faser.models.learned.learned import RELEASED
from faser.models.learned.network import load_network
from faser.models.registry import POLICIES, make_policy

WORLDS = {world.name: world for world in held_out()}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["policy", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


def test_every_policy_is_listed() -> None:
    listed = run("list").splitlines()
    assert [line.split()[0] for line in listed] == list(POLICIES)


def test_a_fixed_length_does_the_same_at_every_load_and_loses_past_the_knee(tmp_path: Path) -> None:
    picture = tmp_path / "fixed.svg"
    told = json.loads(
        run("show", "fixed:4", "--world", "cpu-weak-drafter", "--loads", "1,32", "--json", "-o", str(picture))
    )
    low, high = told["loads"]
    assert told["policy"] == "fixed:4"
    assert low["mean_length"] > 3.5
    assert high["mean_length"] > 3.5
    assert high["ratio"] < 0.9
    for load in told["loads"]:
        least, most = load["ratio_ci"]
        assert least < load["ratio"] < most < 2.0 * least
    assert sum(low["shares"]) == pytest.approx(1.0)
    assert picture.read_text().count("<svg") == 1


def test_price_shortens_with_the_load_and_says_why() -> None:
    text = run("show", "price", "--world", "gpu-small-knee", "--loads", "1,64", "--steps", "200")
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["1"], ["64"])]
    lengths = [float(row[1]) for row in rows[:2]]
    assert lengths[0] > lengths[1] + 1.0
    assert rows[2][1] == rows[3][1] == "why:"


def test_no_speculation_is_its_own_measure() -> None:
    (stroke,) = portray("off", WORLDS["gpu-ngram"], (4,), 50, explained)
    assert stroke.ratio == 1.0
    assert stroke.ratio_ci == (1.0, 1.0)
    assert stroke.acceptance is None
    assert stroke.shares[0] == 1.0


def test_a_learned_policy_tells_where_it_comes_from() -> None:
    told = json.loads(run("show", "learned", "--loads", "8", "--steps", "40", "--json"))
    assert len(told["manifest"]["sha256"]) == 64
    assert told["manifest"]["training"]["steps"] > 0


def test_a_trained_policy_is_released_with_its_figures(tmp_path: Path) -> None:
    trained, evaluation, folder = tmp_path / "run" / "policy.json", tmp_path / "evaluation.json", tmp_path / "weights"
    trained.parent.mkdir()
    for name in ("policy.json", "policy.safetensors"):
        shutil.copy(RELEASED.with_name(name), trained.parent / name)
    figures = {"violations_over_unaware": 0.4, "goodput_over_price": {"ratio": 1.02, "low": 1.0, "high": 1.04}}
    judged = {"standing": {f"learned:{trained}": figures}, "worlds": ["one", "another"], "seeds": 3}
    evaluation.write_text(json.dumps(judged, indent=1))
    asked = ("release", str(trained), "--evaluation", str(evaluation), "--output", str(folder))
    run(*asked)
    manifest = load_network(folder / "policy.json").manifest
    assert manifest.results == {"worlds": 2, "seeds": 3, **figures}
    make_policy(f"learned:{folder / 'policy.json'}", Capabilities(k_max=5))
    before = (folder / "policy.json").read_bytes()
    trained.with_suffix(".safetensors").write_bytes(b"no weights")
    with pytest.raises(FaserError, match="sha256"):
        run(*asked)
    for odd, seen in (
        ({"standing": {"price": {}}, "worlds": []}, "price"),
        ({"policies": {f"learned:{RELEASED}": {}}, "worlds": 5}, "no policy with objectives"),  # as it was before
        ({"standing": None, "worlds": []}, "no policy with objectives"),
        ({"standing": {f"learned:{RELEASED}": {}}, "worlds": 5}, "learned:"),
        ({"standing": {f"learned:{RELEASED}": 3}, "worlds": 3}, "learned:"),
    ):
        evaluation.write_text(json.dumps(odd))
        with pytest.raises(FaserError, match=f"the evaluation has {seen}.*; expected learned:"):
            run("release", str(RELEASED), "--evaluation", str(evaluation), "--output", str(folder))
    assert (folder / "policy.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("show", "nonsense"), "unknown policy"),
        (("show", "learned:~nobody-at-all/policy.json"), "no such home"),
        (("show", "price", "--world", "atlantis"), "world 'atlantis'"),
        (("show", "price", "--loads", "0"), "loads '0'"),
        (("show", "price", "--loads", "1,x"), "loads '1,x'"),
        (("release", str(RELEASED), "--evaluation", "/nowhere"), "--evaluation /nowhere: "),
    ],
)
def test_bad_input_is_one_clear_line(arguments: tuple[str, ...], fault: str) -> None:
    with pytest.raises(FaserError, match=fault) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)


def test_figures_of_a_trained_policy_are_told_in_short() -> None:
    text = run("show", "learned", "--loads", "8", "--steps", "40")
    assert "{" not in text
    assert not re.search(r"\.\d{6}|\[", text)
    results = load_network(RELEASED).manifest.results
    assert all(f"  {name}: " in text for name, value in results.items() if value is not None)
    over: Any = results["goodput_over_price"]
    assert f"  goodput_over_price: {over['ratio']:.4g} ({over['low']:.4g} to {over['high']:.4g})\n" in text


def test_a_ratio_of_one_seed_has_no_interval() -> None:
    assert _in_short({"ratio": 1.02345, "low": None, "high": None}) == "1.023"
    assert _in_short({"ratio": 1.02345, "low": 0.9, "high": 1.1}) == "1.023 (0.9 to 1.1)"


@pytest.mark.parametrize(
    "command",
    [["policy", "show", "off"], ["evaluate"], ["profile"], ["calibrate", __file__], ["exits", "train"]],
    ids=lambda command: command[0],
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(command: list[str], tmp_path: Path) -> None:
    for place, seen in ((tmp_path / "none" / "file", "no folder"), (tmp_path, "is a folder")):
        result = CliRunner().invoke(app, [*command, "-o", str(place)])
        assert isinstance(result.exception, UsageError)
        assert seen in str(result.exception)
        assert "--output" in str(result.exception)


def test_a_picture_that_cannot_be_written_costs_no_result(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["policy", "show", "off", "--loads", "1", "--steps", "20", "-o", "/dev/full"])
    assert isinstance(shown.exception, OSError)  # told in one line by main()
    assert "1.00x" in shown.stdout


def test_a_judgement_that_cannot_be_written_is_printed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faser.models.evaluation.evaluate.evaluate", lambda *_: None)
    monkeypatch.setattr("faser.models.evaluation.standing.summary", lambda _: {"policies": {"price": {}}})
    judged = CliRunner().invoke(app, ["evaluate", "-o", "/dev/full", "--json"])
    assert isinstance(judged.exception, OSError)
    assert json.loads(judged.stdout)["policies"] == {"price": {}}


def test_a_folder_that_cannot_be_is_refused_before_any_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("{}")
    recipe = str(RELEASED.with_name("policy.recipe.toml"))
    for command in (
        ["policy", "release", str(RELEASED), "--evaluation", str(file)],
        ["train", "--config", recipe],
        ["sweep", "--config", recipe],
    ):
        result = CliRunner().invoke(app, [*command, "-o", str(file / "sub")])
        assert isinstance(result.exception, UsageError), command
        assert "--output" in str(result.exception)
    result = CliRunner().invoke(app, ["train", "--config", recipe, "--seed", "-1", "-o", str(tmp_path / "run")])
    assert isinstance(result.exception, UsageError)
    assert "seed -1; expected 0.." in str(result.exception)


def test_a_judged_policy_that_not_every_world_can_have_says_so() -> None:
    row = {
        "goodput": 1.0,
        "ci": [None, None],
        "gap_closed": None,
        "envelope_ratio_min": 1.0,
        "envelope_ratio_mean": 1.0,
    }
    rows = {
        "fixed:5": row | {"worlds": {"a": {"1": {}}, "b": {}}},
        "off": row | {"worlds": {"a": {"1": {}}, "b": {"1": {}}}},
    }
    text = drawn({"policies": rows, "tables": {}, "worlds": 2, "seeds": 1})
    assert [line.split()[0] for line in text.splitlines() if line.endswith("in 1 of 2 worlds")] == ["fixed:5"]


def test_by_slack_whoever_is_late_gets_longer_drafts_and_its_tokens_are_worth_more(tmp_path: Path) -> None:
    picture = tmp_path / "slack.svg"
    flags = ("--slack", "--world", "gpu-small-knee", "--loads", "16,64", "--steps", "150")
    told = json.loads(run("show", "price", *flags, "--json", "-o", str(picture)))
    assert len(told["slack_edges"]) == len(told["loads"][0]["lengths"]) - 1
    for load in told["loads"]:
        seen = [at for at, steps in enumerate(load["urgent"]) if steps > 30]
        behind, ahead = seen[0], seen[-1]
        assert load["values"][behind] > 2.0 * load["values"][ahead] >= 2.0
    dear = told["loads"][-1]  # where not everybody can have drafts, those who are late have them
    behind = next(at for at, steps in enumerate(dear["urgent"]) if steps > 30)
    assert dear["lengths"][behind] > 2.0 * dear["others_length"]
    assert picture.read_text().count("<svg") == 1
    table = run("show", "price:even", *flags)
    assert "by tokens ahead of their objective" in table
    assert "(" not in table.splitlines()[-1]  # it has no values
