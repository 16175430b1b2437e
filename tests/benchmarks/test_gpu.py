"""The GPU benchmark without a GPU: its dry run end to end, its kernels compiled for Hopper, its arithmetic by hand."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import faser

FOLDER = Path(faser.__file__).parent / "benchmarks" / "gpu"
# The machine with the GPU may have torch, numpy and Triton alone.
WITHOUT = "import sys; sys.modules.update(dict.fromkeys(('msgspec', 'zmq', 'vllm', 'transformers', 'safetensors')));"
SCRIPT = repr(str(FOLDER / "run.py"))
RUN = f"{WITHOUT} import runpy; sys.argv[0] = {SCRIPT}; runpy.run_path(sys.argv[0], run_name='__main__')"
PARTS = [
    "partitions", "decoder", "kernel", "overlap tiny-target/1", "overlap tiny-target/2", "pruning tiny-target/2",
    "training",
]  # fmt: skip


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    output = tmp_path_factory.mktemp("gpu") / "gpu.json"
    options = ["--dry-run", "--requests", "1", "2", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-c", RUN, *options],
        capture_output=True,
        text=True,
        cwd=output.parent,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


@pytest.fixture(scope="module")
def parts(dry_run: tuple[Path, str]) -> dict[str, Any]:
    return {name: part["result"] for name, part in json.loads(dry_run[0].read_text())["parts"].items()}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from loaded(monkeypatch, "run")


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from loaded(monkeypatch, "plot")


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    yield from loaded(monkeypatch, "machines")


def loaded(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[ModuleType]:
    """Import a module of the folder, and forget it and its neighbours: their names are short, and only theirs there."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module(name)
    for module in FOLDER.glob("*.py"):
        sys.modules.pop(module.stem, None)


def test_every_part_runs_dry_without_what_a_gpu_machine_may_lack(parts: dict[str, Any]) -> None:
    assert list(parts) == PARTS
    assert "msgspec" in parts["training"]["skipped"]


def test_the_file_says_that_it_was_a_dry_run(dry_run: tuple[Path, str]) -> None:
    assert json.loads(dry_run[0].read_text())["machine"]["is_dry_run"] is True


def test_the_decoders_fused_kernels_compute_what_plain_torch_does(parts: dict[str, Any]) -> None:
    assert set(parts["decoder"]) == {"add_norm", "residual", "gate", "queries", "keys", "values"}
    assert max(parts["decoder"].values()) < 1e-5


def test_the_exit_kernel_agrees_with_its_reference(parts: dict[str, Any]) -> None:
    agreement = parts["kernel"]["agreement"]["float32"]
    assert agreement["equal"] == agreement["steps"] > 0
    assert agreement["equal_requests"] == agreement["requests"]
    assert set(parts["kernel"]["times_ms"]) == {"1", "2"}


def test_overlap_is_timed_on_every_partition_and_changes_no_token(parts: dict[str, Any]) -> None:
    for requests in (1, 2):
        found = parts[f"overlap tiny-target/{requests}"]
        assert list(found["partitions"]) == ["unsplit", "streams", "1:3"]
        for own in found["partitions"].values():
            assert own["equal_tokens"] == 1.0
            assert min(own[name]["median"] for name in ("draft_ms", "verify_ms", "step_ms", "gain")) > 0
        assert found["partitions"]["1:3"]["allocated"] == [32, 100]
        assert found["partitions"]["unsplit"]["gain"] == {"median": 1.0, "q1": 1.0, "q3": 1.0, "count": 2}


def test_rows_kept_behind_the_cut_come_out_as_in_the_whole_pass(parts: dict[str, Any]) -> None:
    found = parts["pruning tiny-target/2"]
    assert found["equal_tokens"] == {"1": 1.0, "2": 1.0, "3": 1.0}
    assert set(found["ms"]) == {"whole", *(f"{kind} {kept}" for kind in ("free", "decided") for kept in (1, 2, 3))}


def test_a_second_run_runs_nothing(
    dry_run: tuple[Path, str], run: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    output, first = dry_run
    assert first.count(": done in") == len(PARTS)
    content = json.loads(output.read_text())
    options = argparse.Namespace(**content["settings"], output=output, only="", seconds=0.0)
    machine = SimpleNamespace(facts=lambda: content["machine"], is_dry=True)
    assert run.run(machine, options) == 0
    assert capsys.readouterr().out == f"gpu: results in {output}\n"


SETTINGS = {"requests": [1], "length": 1, "context": 1, "rounds": 1, "targets": []}


class Runs:
    """Made-up parts, counted, in a run of their own file."""

    def __init__(self, run: ModuleType, monkeypatch: pytest.MonkeyPatch, output: Path) -> None:
        self.run_module, self.output, self.calls = run, output, list[str]()
        self.failing: set[str] = set()
        self.gpu = "H200"
        monkeypatch.setattr(run, "plan", lambda machine, options: [(name, self.part(name)) for name in "abc"])

    def part(self, name: str) -> Any:
        def measure() -> dict[str, Any]:
            self.calls.append(name)
            if name in self.failing:
                raise RuntimeError(f"{name} is out of memory")
            return {"answer": name}

        return measure

    def __call__(self, **changed: Any) -> int:
        options = argparse.Namespace(**(SETTINGS | {"output": self.output, "only": "", "seconds": 60.0} | changed))
        status: int = self.run_module.run(SimpleNamespace(facts=lambda: {"gpu": self.gpu}), options)
        return status

    def parts(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output.read_text())["parts"]
        return found


@pytest.fixture
def runs(run: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    return Runs(run, monkeypatch, tmp_path / "new" / "gpu.json")


def test_what_is_finished_is_not_run_again(runs: Runs) -> None:
    assert runs() == 0
    assert runs() == 0
    assert runs.calls == ["a", "b", "c"]
    assert {name: part["result"] for name, part in runs.parts().items()} == {name: {"answer": name} for name in "abc"}


def test_a_part_that_fails_is_told_does_not_stop_the_others_and_is_tried_again(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.failing = {"b"}
    assert runs() == 1
    assert runs.parts()["b"]["error"] == "RuntimeError: b is out of memory"
    assert "RuntimeError: b is out of memory" in capsys.readouterr().out
    runs.failing = set()
    assert runs() == 0
    assert runs.calls == ["a", "b", "c", "b"]
    assert runs.parts()["b"]["result"] == {"answer": "b"}


def test_each_part_is_written_before_the_next_begins(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    part = runs.part

    def watched(name: str) -> Any:
        def measure() -> dict[str, Any]:
            seen.append(list(runs.parts()) if runs.output.exists() else [])
            found: dict[str, Any] = part(name)()
            return found

        return measure

    monkeypatch.setattr(runs, "part", watched)
    assert runs() == 0
    assert seen == [[], ["a"], ["a", "b"]]


def test_it_stops_in_time_and_goes_on_when_run_again(
    runs: Runs, run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 10_000, 20))
    monkeypatch.setattr(run.time, "monotonic", lambda: float(next(now)))
    assert runs(seconds=50.0) == 3
    assert runs.calls == ["a"]
    assert runs(seconds=1000.0) == 0
    assert runs.calls == ["a", "b", "c"]


def test_a_part_is_not_begun_that_would_end_too_late_by_the_longest_of_its_kind(
    runs: Runs, run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 0.0, 40.0, 40.0])  # begun; the first part's begin and end; before the second
    monkeypatch.setattr(run.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(run, "plan", lambda machine, options: [(name, runs.part(name)) for name in ("k/1", "k/2")])
    assert runs(seconds=90.0) == 3
    assert runs.calls == ["k/1"]


def test_only_what_is_named_runs(runs: Runs) -> None:
    assert runs(only="b") == 0
    assert runs.calls == ["b"]


@pytest.mark.parametrize("changed", ["machine", "settings", "version"])
def test_results_of_other_machines_settings_or_versions_are_not_mixed(
    runs: Runs, run: ModuleType, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    assert runs() == 0
    before = runs.output.read_text()
    other: dict[str, Any] = {}
    if changed == "machine":
        runs.gpu = "B200"
    elif changed == "settings":
        other = {"context": 2}
    else:
        monkeypatch.setattr(run, "VERSION", run.VERSION + 1)
    with pytest.raises(SystemExit, match=f"made with another {changed}"):
        runs(**other)
    assert runs.output.read_text() == before


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"version": 1}'])
def test_a_damaged_file_is_refused_in_one_line(runs: Runs, content: str) -> None:
    runs.output.parent.mkdir()
    runs.output.write_text(content)
    with pytest.raises(SystemExit, match=r"give another --output$"):
        runs()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--dry-run"], "give an --output"),
        (["--requests", "0"], "at least 1"),
        (["--targets", "gpt"], "invalid choice"),
    ],
)
def test_bad_options_are_refused(
    run: ModuleType, given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.arguments(given)
    assert told in capsys.readouterr().err


def test_every_kernel_compiles_for_hopper() -> None:
    """What the interpreter lets pass and the compiler does not: types that change within a branch, above all."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("compile_kernels.py"))],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["_add_norm", "_gate", "_rope_store", "_where_am_i", "_decide"]


# ------------------------------------------------------------------ stopwatch and picture


def test_arms_take_turns_in_rotating_order_and_keep_their_own_times(
    machines: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    def arm(name: str, lasts: float) -> Any:
        def work() -> None:
            order.append(name)
            clock[0] += lasts

        return work

    monkeypatch.setattr(machines.torch.cuda, "Event", Event)
    monkeypatch.setattr(machines.torch.cuda, "synchronize", lambda: None)
    machine = object.__new__(machines.CudaMachine)
    arms = {"a": arm("a", 1.0), "b": arm("b", 2.0), "c": arm("c", 4.0)}
    assert machine.rounds(arms, 3) == {"a": [1.0] * 3, "b": [2.0] * 3, "c": [4.0] * 3}
    assert "".join(order[3 * machines.WARM_UPS :]) == "abcbcacab"


def test_median_and_quartiles(machines: ModuleType) -> None:
    assert machines.told([3.0, 1.0, 2.0, 5.0, 4.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "count": 5}
    assert machines.told([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0, "count": 1}


def partition(draft: float, verify: float, step: float, gain: float, allocated: tuple[int, int]) -> dict[str, Any]:
    times = {"draft_ms": draft, "verify_ms": verify, "step_ms": step, "gain": gain}
    return {"allocated": list(allocated)} | {name: {"median": value} for name, value in times.items()}


def made_up() -> dict[str, Any]:
    """Return results whose overlap is known: halves take 2+3 ms alone, the whole 4+4."""
    half = {"unsplit": partition(2.0, 3.0, 5.0, 1.0, (132, 132)), "1:3": partition(2.5, 3.5, 4.0, 1.25, (32, 100))}
    whole = {"unsplit": partition(4.0, 4.0, 8.0, 1.0, (132, 132)), "1:3": partition(4.0, 5.0, 6.0, 1.333, (32, 100))}
    results = {"overlap t/1": half, "overlap t/2": whole}
    return {
        "machine": {"is_dry_run": False, "gpu": "H200", "torch": "2.11"},
        "parts": {name: {"result": {"partitions": found}} for name, found in results.items()}
        | {"overlap t/4": {"error": "out of memory"}, "kernel": {"result": {}}},
    }


def test_gains_and_bounds_are_those_worked_out_by_hand(plot: ModuleType) -> None:
    one, two = plot.rows(made_up())
    assert (one.requests, one.ping_pong, one.ping_pong_bound) == (1, None, None)
    assert one.ahead_bound == pytest.approx(5.0 / 3.0)
    assert (two.requests, two.partition, two.allocated, two.ahead) == (2, "1:3", (32, 100), 1.333)
    assert two.ahead_bound == pytest.approx(2.0)
    assert two.hidden == pytest.approx((4.0 + 5.0 - 6.0) / 4.0)
    assert two.ping_pong == pytest.approx(8.0 / (2 * 4.0))
    assert two.ping_pong_bound == pytest.approx(8.0 / (2 * 3.0))


def test_the_table_has_a_line_per_partition(plot: ModuleType) -> None:
    lines = plot.table(plot.rows(made_up())).splitlines()
    assert lines[2] == "| t | 1 | 1:3 | 32+100 | 2.50 | 3.50 | 1.25 | 1.67 | 80% |  |  |"
    assert lines[3] == "| t | 2 | 1:3 | 32+100 | 4.00 | 5.00 | 1.33 | 2.00 | 75% | 1.00 | 1.33 |"
    assert len({line.count("|") for line in lines}) == 1


def test_the_picture_says_what_it_was_measured_on(plot: ModuleType, dry_run: tuple[Path, str], tmp_path: Path) -> None:
    plot.draw(json.loads(dry_run[0].read_text()), tmp_path / "dry.svg")
    plot.draw(made_up(), tmp_path / "real.svg")
    assert "dry run: these times mean nothing" in (tmp_path / "dry.svg").read_text()
    assert "H200, torch 2.11" in (tmp_path / "real.svg").read_text()
    with pytest.raises(SystemExit, match="no overlap part is finished"):
        plot.draw({"parts": {}, "machine": {}}, tmp_path / "none.svg")
