"""Sweeps: the grid, what is refused, what is there already, and runs in processes of their own, Ray's too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

pytest.importorskip("stable_baselines3")

from faser.controller.cli.main import app
from faser.controller.cli.sweep_workers import on_processes
from faser.controller.cli.training import drawn
from faser.controller.errors import EndpointError, UsageError
from faser.models.policies.policy import PolicyError
from faser.models.training.config import TrainConfig
from faser.models.training.sweep import Outcome, TrainingRun, best_first, finished, grid, means
from faser.models.training.train import Trained

TINY = TrainConfig(
    worlds=2, slots=8, engines=1, rollout_steps=8, total_steps=16, minibatch=8, judge_every=2, hidden=8, spans=2,
)  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return a file with a training that takes a second."""
    path = tmp_path / "tiny.toml"
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in asdict(TINY).items()))
    return path


def sweep(recipe: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["sweep", "--config", str(recipe), "-o", str(recipe.parent / "runs"), *arguments])


def rows(text: str) -> dict[int, dict[str, Any]]:
    """Return the runs of a JSON object by their seed."""
    return {row["values"]["seed"]: row for row in json.loads(text)["runs"]}


def run_of(seed: int, folder: Path, hidden: int = 8) -> TrainingRun:
    values = {"hidden": hidden, "seed": seed}
    return TrainingRun(values, replace(TINY, hidden=hidden, seed=seed), folder / f"hidden-{hidden}_seed-{seed}")


# --- the grid ---


def test_every_combination_is_a_run_with_a_folder_that_the_order_of_flags_does_not_move(tmp_path: Path) -> None:
    values = {"learning_rate": (1e-4, 3e-4), "hidden": (16, 32)}
    runs = grid(TINY, (0, 1, 2), values, tmp_path)
    assert len({run.folder for run in runs}) == len(runs) == 12
    assert {(run.config.learning_rate, run.config.hidden, run.config.seed) for run in runs} == {
        (rate, hidden, seed) for rate in (1e-4, 3e-4) for hidden in (16, 32) for seed in (0, 1, 2)
    }
    assert all(replace(run.config, learning_rate=3e-4, hidden=8, seed=0) == TINY for run in runs)
    assert runs[0].folder == tmp_path / "hidden-16_learning_rate-0.0001_seed-0"
    assert runs == grid(TINY, (0, 1, 2), dict(reversed(values.items())), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--set", "depth=1"], "unknown field depth"),
        (["--set", "seed=1,2"], "expected --seeds"),
        (["--set", "hidden=16,wide"], "expected int"),
        (["--set", "hidden=16,2"], "hidden 2; expected 4..256"),
        (["--set", "learning_rate=nan"], "learning_rate nan"),
        (["--set", "head=magic"], "head 'magic'; expected 'values'"),
        (["--set", "hidden=16,16"], "different values"),
        (["--set", "hidden=16", "--set", "hidden=32"], "twice"),
        (["--set", "hidden"], "FIELD=VALUE"),
        (["--set", "hidden=16,"], "FIELD=VALUE"),
        (["--seeds", "0,0"], "different numbers"),
        (["--seeds", "first"], "whole numbers"),
        (["--address", "somewhere:6379"], "--ray"),
        (["--ray", "--address", "somewhere:6379", "--workers", "2"], "no --workers"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_runs(arguments: list[str], hint: str, recipe: Path) -> None:
    result = sweep(recipe, *arguments)
    assert isinstance(result.exception, UsageError)
    assert hint in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (recipe.parent / "runs").exists()


# --- what came of them ---


def test_outcomes_are_ranked_by_their_best_and_by_the_mean_over_seeds(tmp_path: Path) -> None:
    scores = {(8, 0): 1.0, (8, 1): 3.0, (16, 0): 2.5, (16, 1): 2.0}
    outcomes = [
        Outcome(run_of(seed, tmp_path, hidden), Trained(tmp_path, 0.5, best, 64, 1.0))
        for (hidden, seed), best in scores.items()
    ]
    outcomes.insert(0, Outcome(run_of(2, tmp_path), None, "ValueError: no"))
    ranked = best_first(outcomes)
    assert [outcome.trained and outcome.trained.best for outcome in ranked] == [3.0, 2.5, 2.0, 1.0, None]
    assert means(outcomes) == [({"hidden": 16}, 2.25, 2), ({"hidden": 8}, 2.0, 2)]
    text = drawn(outcomes)
    assert text.index("hidden=8 seed=1") < text.index("hidden=16 seed=0") < text.index("seed=2: ValueError: no")


# --- on processes ---


def test_a_failing_run_is_reported_the_others_go_on_and_are_not_run_again(recipe: Path) -> None:
    blocked = recipe.parent / "runs" / "seed-1"
    blocked.parent.mkdir()
    blocked.write_text("a file where a folder must be")
    result = sweep(recipe, "--seeds", "0,1", "--workers", "2", "--json")
    assert result.exit_code == 1
    first = rows(result.stdout)
    assert first[1]["failed"].startswith("FileExistsError")
    assert "seed=1: failed, FileExistsError" in result.stderr
    assert len({os.getpid(), first[0]["pid"], first[1]["pid"]}) == 3
    manifest = Path(first[0]["manifest"])
    made = manifest.stat().st_mtime_ns

    blocked.unlink()
    result = sweep(recipe, "--seeds", "0,1", "--json")
    assert result.exit_code == 0
    second = rows(result.stdout)
    assert manifest.stat().st_mtime_ns == made
    assert [second[seed]["pid"] is None for seed in (0, 1)] == [True, False]
    assert second[0]["best"] == first[0]["best"]
    bests = [row["best"] for row in json.loads(result.stdout)["runs"]]
    assert bests == sorted(bests, reverse=True)


def test_a_run_that_is_killed_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly.py").write_text(
        "import os\n"
        "from faser.controller.cli.evaluate import decided\n"
        "def decide(*arguments):\n"
        "    try: os.close(os.open(__file__ + '.killed', os.O_CREAT | os.O_EXCL))\n"
        "    except FileExistsError: return decided(*arguments)\n"
        "    os.kill(os.getppid(), 9)\n"  # engines run in a child of the run's process
    )
    monkeypatch.syspath_prepend(tmp_path)
    from deadly import decide  # type: ignore[import-not-found]

    outcomes = list(on_processes([run_of(0, tmp_path), run_of(1, tmp_path)], 2, decide, ""))
    assert sorted(outcome.trained is None for outcome in outcomes) == [False, True]
    (killed,) = (outcome for outcome in outcomes if outcome.trained is None)
    assert killed.reason.startswith("BrokenProcessPool")
    (made,) = (outcome for outcome in outcomes if outcome.trained is not None)
    assert_only_a_whole_manifest_of_the_recipe_counts(made)
    assert finished(killed.run) is None


def assert_only_a_whole_manifest_of_the_recipe_counts(made: Outcome) -> None:
    found = finished(made.run)
    assert made.trained is not None
    assert found is not None
    assert (found.manifest, found.steps) == (made.trained.manifest, made.trained.steps)
    assert (found.first, found.best) == pytest.approx((made.trained.first, made.trained.best), abs=1e-5)
    with pytest.raises(PolicyError, match="made by another recipe"):
        finished(replace(made.run, config=replace(made.run.config, clip=0.2)))
    found.manifest.write_text(found.manifest.read_text()[:100])
    assert finished(made.run) is None


def test_an_interrupt_ends_it_with_what_is_there_and_leaves_no_process(
    recipe: Path, eventually: Callable[..., object]
) -> None:
    with started(recipe, "--seeds", ",".join(map(str, range(40))), "--workers", "1", "--json") as running:
        assert running.stderr is not None
        line = running.stderr.readline()
        running.send_signal(signal.SIGINT)
        stdout, stderr = running.communicate(timeout=60)
    assert line.startswith("1/40 seed=0: ")
    assert running.returncode == 130
    assert "Traceback" not in stderr
    told = json.loads(stdout)
    assert told["interrupted"]
    assert 1 <= len(told["runs"]) < 40
    eventually(lambda: not left_of(recipe), "no process of the sweep is left")


def started(recipe: Path, *arguments: str) -> subprocess.Popen[str]:
    """Return a sweep as a user starts it, with the recipe in the environment of all its processes."""
    command = [sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()", "sweep"]
    command += ["--config", str(recipe), "-o", str(recipe.parent / "runs"), *arguments]
    environment = {**os.environ, "SWEPT": str(recipe)}
    return subprocess.Popen(
        command, cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def left_of(recipe: Path) -> list[str]:
    """Return the processes that a sweep has left behind."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SWEPT={recipe}\0".encode() in (path / "environ").read_bytes():
                found.append(path.name)
    return found


# --- on Ray ---


def test_without_ray_one_line_names_the_extra(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = sweep(recipe, "--ray")
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == "no ray here; expected the extra sweep; pip install 'faser-vllm[train,sweep]'"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_an_address_where_nobody_listens_is_refused_at_once(
    address: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    result = sweep(recipe, "--ray", "--address", address)
    assert isinstance(result.exception, EndpointError)
    assert address in str(result.exception)
    assert isinstance(sweep(recipe, "--ray", "--address", "here").exception, UsageError)


@pytest.mark.slow  # `make proof`
def test_a_local_ray_instance_makes_runs_in_worker_processes_of_its_own(
    recipe: Path, eventually: Callable[..., object]
) -> None:
    pytest.importorskip("ray")
    with started(recipe, "--seeds", "0,1", "--ray", "--workers", "2", "--json") as running:
        stdout, stderr = running.communicate(timeout=240)
    assert running.returncode == 0, stderr
    found = rows(stdout)
    assert all(Path(found[seed]["manifest"]).is_file() for seed in (0, 1))
    assert len({running.pid, found[0]["pid"], found[1]["pid"]}) == 3
    eventually(lambda: not left_of(recipe), "Ray's own processes end with the sweep")
