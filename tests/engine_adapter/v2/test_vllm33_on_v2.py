"""The same engines under vLLM 0.33: its Python files run on the operators of the installed 0.32. Long, so not in CI.

The wheel (336 MB) is fetched by pip, or is the file that FASER_VLLM33_WHEEL names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VERSION = "0.33.0"
RANDOM = {"random": 4, "seed": 1}
FOREIGN = (".so", "vllm/vllm-rs")  # built for CUDA
METADATA = f"vllm-{VERSION}.dist-info/METADATA"


def wheel(folder: Path) -> Path:
    """Return vLLM's CUDA wheel, whose Python files are those of every build."""
    if named := os.environ.get("FASER_VLLM33_WHEEL"):
        return Path(named)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), f"vllm=={VERSION}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"vLLM {VERSION} cannot be fetched: {done.stderr[-300:]}; name a wheel in FASER_VLLM33_WHEEL")
    return next(folder.glob("vllm-*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Put the wheel's Python files beside the installed operators; its version says that it is for CPUs."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if not name.endswith(FOREIGN)])
    installed = next(Path(sys.prefix).rglob("site-packages/vllm"))
    for operators in installed.glob("*.so"):
        shutil.copy(operators, folder / "vllm")
    metadata = folder / METADATA
    metadata.write_text(metadata.read_text().replace(f"Version: {VERSION}", f"Version: {VERSION}+cpu", 1))
    return folder


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory, start_forks: Callable[..., Any]) -> Iterator[Any]:
    """A process of vLLM 0.33."""
    site = unpack(wheel(tmp_path_factory.mktemp("wheel")), tmp_path_factory.mktemp("site"))
    running = start_forks(str(site))
    yield running
    running.close()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("method", ["near", "ngram_gpu", "eagle", "eagle3"])
def test_outputs_are_the_targets_and_every_length_is_obeyed(newer: Any, tiny: Any, method: str, is_async: bool) -> None:
    whole = newer("generate", **tiny.without(method))
    run = newer("generate", **tiny.scenario(method), is_async=is_async, rule=RANDOM)
    assert run["version"].startswith(VERSION)
    assert run["tokens"] == whole["tokens"]
    assert run["check"]["disobeyed"] == run["check"]["misreported"] == []
    assert (run["faults"], run["miscounted"], run["is_steered"]) == ({}, 0, True)
    if method in ("eagle", "eagle3"):
        assert run["check"]["draft_rows"] < 0.8 * run["check"]["rows_if_uniform"]


def test_two_groups_take_turns(newer: Any, tiny: Any) -> None:
    whole = newer("generate", **tiny.without("eagle3"))
    run = newer("sides:beside", **tiny.scenario("eagle3"), is_async=True, rule=RANDOM, chance=0.2)
    assert run["tokens"] == whole["tokens"]
    assert (run["faults"], run["miscounted"], run["is_late_on"]) == ({}, 0, True)
    assert max(run["lateness"]) > 4


def test_length_0_leaves_out_the_drafter(newer: Any, tiny: Any) -> None:
    run = newer("generate", **tiny.scenario("eagle3"), is_async=True, rule={"fixed": 0})
    assert run["check"]["rounds"] == 0
    assert run["passes"] < run["check"]["records"] / 4  # where there was no room for a prompt's rows
    assert run["heads"] == 0
    assert run["faults"] == {}


@pytest.mark.parametrize("method", ["near", "eagle3"])
def test_a_drafter_that_was_left_out_drafts_the_same(newer: Any, tiny: Any, method: str) -> None:
    given = tiny.scenario(method) | {"is_async": True, "rule": {"waves": [0, 0, 0, 0, 0, 3, 2]}, "tokens": 16}
    run = newer("lulls:generate_with_lulls", **given, prompts=[5, 17])
    whole = newer("lulls:generate_with_lulls", **given, prompts=[5, 17], environment={"FASER_SKIPPED_TOKENS": "0"})
    assert (run["tokens"], run["proposed"]) == (whole["tokens"], whole["proposed"])
    assert (sum(run["caught_up"]) > 10, run["passes"] < whole["passes"], run["faults"]) == (True, True, {})


def test_everything_that_vllm_does_in_a_batch_goes_on(newer: Any, tiny: Any) -> None:
    whole = newer("everything", **tiny.without("eagle3"))
    run = newer("everything", **tiny.scenario("eagle3"), is_async=True, rule=RANDOM)
    finished = {name: said for name, said in whole["outputs"].items() if name not in ("abort-1", "abort-4")}
    assert {name: run["outputs"].get(name) for name in finished} == finished
    assert run["preemptions"] > 0
    assert (run["faults"], run["miscounted"], run["is_steered"]) == ({}, 0, True)


@pytest.mark.parametrize("method", ["near", "eagle3"])
def test_rows_that_leave_change_nothing(newer: Any, tiny: Any, method: str) -> None:
    whole = newer("generate", **tiny.without(method))
    exits = {"layers": [1], "thresholds": [0.3, 0.6], "kind": "scores"}
    run = newer("prunings:pruned", **tiny.scenario(method), is_async=True, rule=RANDOM, exits=exits)
    assert run["version"].startswith(VERSION)
    assert run["tokens"] == whole["tokens"]
    assert (run["is_pruning"], run["faults"], run["miscounted"]) == (True, {}, 0)
    assert sum(row[1] for step in run["pruned"] for row in step["rows"]) > 20


def test_adaptive_verification_takes_fasers_numbers(newer: Any, tiny: Any) -> None:
    whole = newer("generate", **tiny.without("eagle3"))
    scenario = tiny.scenario("eagle3", enable_adaptive_verification=True)
    dear = {"rows": [1, 4, 8, 64], "seconds": [0.005, 0.005, 0.02, 0.3], "weights": [1.0, 2.0]}
    run = newer("generate", **scenario, is_async=True, rule={"fixed": 4}, admission=dear)
    assert run["tokens"] == whole["tokens"]
    assert 0 < run["check"]["admitted"] < 0.4 * run["check"]["scheduled_drafts"]
    assert (run["faults"], run["miscounted"], run["is_steered"]) == ({}, 0, True)
    seen = newer("admissions", batches=2_000, slowness=1.0, weight=1.0)
    assert seen["same"] == 2_000


def test_price_governs(newer: Any, tiny: Any) -> None:
    many = {"sampling": {"max_tokens": 60}, "prompts": [5, 17, 40, 30, 9, 12, 22, 7]}
    whole = newer("generate", **tiny.without("eagle3"), **many)
    scenario = tiny.scenario("eagle3", enable_adaptive_verification=True)
    run = newer("generate", **scenario, is_async=True, policy="price", **many)
    assert run["tokens"] == whole["tokens"]
    assert run["governed"]["admissions"] > 10
    assert (run["faults"], run["miscounted"], run["is_steered"]) == ({}, 0, True)
