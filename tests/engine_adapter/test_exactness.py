"""Greedy float32 outputs under FASER equal those without speculation, with everything vLLM does in one batch.

Random lengths 0..6 per request and step over a real socket, chunked prefill, prefix-cache hits, preemption,
structured output, stop strings, aborts, n > 1, penalties, logprobs and short max_tokens; see gauntlet.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faser.controller.engine.launch import openmp_library
from faser.models.embedded.pair import ensure_embedded_drafter, ensure_embedded_target

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

GAUNTLET = Path(__file__).with_name("gauntlet.py")
K_MAX = 6
DRAFT_MAX = 4  # of the drafter's, where copies may be longer
END_OF_TURN = 2  # the embedded target's token
ABORTED = 4  # three by the gauntlet, and the one that says its stop string, which is found outside of the engine core
KINDS = {"logprobs", "penalty", "json", "stop", "many"}  # whose verification is not that of a plain request
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 640,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 96,  # below the long prompts: they are prefilled in chunks
    "num_gpu_blocks_override": 13,  # below what twelve requests need: some are preempted
    "seed": 0,
}

FEWER_BLOCKS = {"num_gpu_blocks_override": 10}  # requests that copy are done sooner, so fewer are there at once


@pytest.fixture(scope="module")
def target() -> Path:
    return ensure_embedded_target()


@pytest.fixture(scope="module")
def truncated(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's first three layers: a drafter that is mostly wrong."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("truncated")
    for file in target.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(target / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < 3
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def short_folder() -> Iterator[Path]:
    """A private folder whose paths fit into a socket's name."""
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        yield Path(folder)


def speculation(method: str, target: Path, truncated: Path) -> dict[str, Any] | None:
    drafters = {
        "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "draft_model itself": {"method": "draft_model", "model": str(target)},
        "draft_model truncated": {"method": "draft_model", "model": str(truncated)},
        "eagle3": {"method": "eagle3", "model": ""},
    }
    if method == "none":
        return None
    chosen = drafters[method] | {"num_speculative_tokens": K_MAX}
    if method == "eagle3":
        chosen["model"] = str(ensure_embedded_drafter())
    return chosen


def run_gauntlet(
    folder: Path,
    target: Path,
    drafter: dict[str, Any] | None,
    control: str = "",
    exit_layers: tuple[int, ...] = (),
    frontier: int = 0,
    is_killed: bool = False,
    is_copying: bool = False,
    poison: tuple[list[int], ...] = (),
    seed: int = 1,
) -> dict[str, Any]:
    endpoint = f"ipc://{folder / 'engine.sock'}"
    scenario = {
        "model": str(target),
        "engine": ENGINE | ({"speculative_config": drafter} if drafter else {}) | (FEWER_BLOCKS if is_copying else {}),
        "steered": drafter is not None,
        "endpoint": endpoint,
        "seed": seed,
        "control": control,
        "exit_layers": exit_layers,
        "is_killed": is_killed,
        "is_copying": is_copying,
        "poison": poison,
        "result": str(folder / "result.json"),
    }
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "LD_PRELOAD": str(openmp_library() or ""),
        "FASER_RUNTIME_DIR": str(folder),
        "FASER_ENDPOINT": endpoint,
        "FASER_EXIT_HEADS": "coins" if exit_layers else "",
        "FASER_DRAFTER_CORES": "all" if frontier else "",
        "FASER_FRONTIER": str(frontier),
        "FASER_DRAFT_AHEAD": "always",
        "FASER_DEFAULT_K": "2" if is_killed else "0",  # so that steps without a sidecar draft too
        "FASER_LEASE_STEPS": "8" if is_killed else "32",  # the gauntlet is short
        "FASER_SHARED_MIB": "64" if poison else "0",
        "FASER_DRAFT_MAX": str(DRAFT_MAX if is_copying else K_MAX),
    }
    subprocess.run(
        [sys.executable, str(GAUNTLET)], input=json.dumps(scenario), text=True, env=environment, cwd="/", check=True
    )
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


@pytest.fixture(scope="module")
def reference(target: Path, short_folder: Path) -> dict[str, Any]:
    """What vLLM says by itself, without speculation and without FASER."""
    return run_gauntlet(short_folder, target, None)


LEAST_DIFFERENCE = 1e-3  # of log probabilities; rows of another batch are rounded otherwise


def different(result: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Return the requests whose tokens, end, text or log probabilities are not those of the reference."""
    return [name for name, said in reference["outputs"].items() if not _is_same(result["outputs"].get(name, []), said)]


def _is_same(one: list[Any], other: list[Any]) -> bool:
    if [sample[:3] for sample in one] != [sample[:3] for sample in other]:
        return False
    tokens = [(a, b) for mine, theirs in zip(one, other, strict=True) for a, b in zip(mine[3], theirs[3], strict=True)]
    return all(
        a.keys() == b.keys() and all(abs(a[token] - b[token]) < LEAST_DIFFERENCE for token in a) for a, b in tokens
    )


def test_the_reference_says_something(reference: dict[str, Any]) -> None:
    assert not reference["is_steered"]
    assert len(reference["outputs"]) >= 40
    assert reference["cached_tokens"] >= 128
    person = json.loads(reference["outputs"]["kind-json"][0][2])
    assert set(person) == {"name", "age"}
    assert reference["outputs"]["kind-choice"][0][2] in ("blue whale", "red fox")
    assert len(reference["outputs"]["kind-many"]) == 3
    said, reason = reference["outputs"]["kind-stop"][0][:2]
    assert reason == "stop"
    assert said[-1] != END_OF_TURN, "it was not a stop string"


def test_log_probabilities_of_other_tokens_are_noticed(reference: dict[str, Any]) -> None:
    said = reference["outputs"]["kind-logprobs"]
    shifted = [[*sample[:3], sample[3][1:] + sample[3][:1]] for sample in said]
    higher = [[*sample[:3], [{k: v + 0.01 for k, v in each.items()} for each in sample[3]]] for sample in said]
    assert len(said[0][3]) == 24
    for broken in (shifted, higher):
        result = {"outputs": reference["outputs"] | {"kind-logprobs": broken}}
        assert different(result, reference) == ["kind-logprobs"]


# `make proof` for what is marked slow: its nearest relatives run in CI.
@pytest.mark.parametrize(
    "method",
    [
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("ngram", "draft_model itself", "draft_model truncated")),
        "eagle3",
    ],
)
def test_outputs_equal_those_without_speculation(
    method: str, target: Path, truncated: Path, short_folder: Path, reference: dict[str, Any]
) -> None:
    result = run_gauntlet(short_folder, target, speculation(method, target, truncated))
    counts = result["counts"]
    assert different(result, reference) == []
    assert result["is_steered"]
    assert result["faults"] == {}
    # The comparison is worth something only if all of this happened.
    assert counts["lengths"] == list(range(K_MAX + 1))
    assert counts["mixed"] > 40
    assert counts["under_lease"] > 0.9 * counts["records"]
    assert counts["chunked"] > 10
    assert counts["events"]["preempt"] >= 1
    assert counts["events"]["abort"] == ABORTED
    assert counts["excess"] == 0
    assert counts["dropped"] == 0
    assert counts["rested"] > 20
    # Half of the leases stop drafts by random rules, and every verified token of a model has its confidence.
    assert counts["confident"] == (0 if method == "ngram" else counts["verified"])
    assert counts["stopped"] == 0 if method == "ngram" else counts["stopped"] > 20
    assert result["cached_tokens"] >= 128
    if method == "draft_model itself":
        assert counts["accepted"] > 0.9 * counts["verified"]


@pytest.mark.parametrize(
    ("method", "exit_layers"),
    [
        ("eagle3", ()),
        pytest.param("eagle3", (1, 5, 14, 20, 28), marks=pytest.mark.slow),
        *(
            pytest.param(m, (), marks=pytest.mark.slow)
            for m in ("ngram", "draft_model itself", "draft_model truncated")
        ),
    ],
)
def test_copied_drafts_change_nothing(
    method: str, exit_layers: tuple[int, ...], target: Path, truncated: Path, short_folder: Path,
    reference: dict[str, Any],
) -> None:  # fmt: skip
    """Where words repeat themselves, or repeat what others said and somebody poisoned, by random rules.

    Beside the drafter's drafts in one batch.
    """
    drafter = speculation(method, target, truncated)
    answers = tuple(said[0][0] for name, said in reference["outputs"].items() if "plain" in name)
    result = run_gauntlet(
        short_folder,
        target,
        drafter,
        exit_layers=exit_layers,
        is_copying=True,
        poison=answers if not exit_layers else (),
    )
    counts = result["counts"]
    assert (result["poisoned_copies"] > 15) is not bool(exit_layers)
    assert different(result, reference) == []
    assert result["faults"] == {}
    assert result["is_copying"]
    assert counts["copied"] > 200
    assert 0.2 * counts["copied"] < counts["accepted_copies"] < counts["copied"]
    assert (counts["longest_copy"], counts["longest_draft"]) == (K_MAX, DRAFT_MAX)
    assert counts["beside_copies"] > 25
    assert counts["lost_copies"] == 0
    assert counts["confident"] == counts["verified"] if method != "ngram" else counts["confident"] == counts["copied"]
    assert counts["chunked"] > 10
    assert counts["events"]["preempt"] >= 1
    assert counts["events"]["abort"] == ABORTED
    assert counts["excess"] == counts["miscounted"] == counts["dropped"] == 0


@pytest.mark.slow  # `make proof`; test_frontier_engine.py has the short version
@pytest.mark.parametrize("method", ["draft_model itself", "eagle3"])
def test_drafting_ahead_changes_nothing(
    method: str, target: Path, short_folder: Path, reference: dict[str, Any]
) -> None:
    """In a process, which starts while requests are running already."""
    drafter = speculation(method, target, target)
    result = run_gauntlet(short_folder, target, drafter, frontier=K_MAX)
    counts = result["counts"]
    assert different(result, reference) == []
    assert result["faults"] == {}
    is_itself = method == "draft_model itself"
    assert counts["frontier_hits"] > (50 if is_itself else 10)
    assert counts["events"]["preempt"] >= 1
    assert counts["events"]["abort"] == ABORTED
    assert counts["excess"] == 0
    assert counts["accepted"] > (0.9 if is_itself else 0.2) * counts["verified"]
    assert counts["confident"] == counts["verified"]


@pytest.mark.slow  # `make proof`; test_pruning.py has the short version
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("method", "least_without_bonus"), [("eagle3", 100), ("draft_model truncated", 20), ("ngram", 20)]
)
def test_random_pruning_changes_nothing(
    method: str, least_without_bonus: int, target: Path, truncated: Path, short_folder: Path, reference: dict[str, Any]
) -> None:
    """Cuts below, at and between the layers whose states the EAGLE-3 head reads (3, 16 and the last).

    test_pruning.py has cuts above them, and looks at what the head drafts then. As many runs as it takes to have seen a
    thousand request-steps in steps with a cut, cuts of every kind of request, and behind every layer.
    """
    decided = without_bonus = 0
    layers = (1, 3, 5, 14, 16, 20, 28)
    kinds, cut_layers = set[str](), set[int]()
    for seed in range(1, 9):
        result = run_gauntlet(
            short_folder, target, speculation(method, target, truncated), exit_layers=layers, seed=seed
        )
        counts = result["counts"]
        assert different(result, reference) == []
        assert result["is_pruning"]
        assert result["faults"] == {}
        assert counts["told_wrongly_pruned"] == counts["ended_without_bonus"]
        assert 0.0 < counts["saved_rows"] < counts["pruned"]
        assert counts["chunked"] > 10
        assert counts["events"]["preempt"] >= 1
        assert result["cached_tokens"] >= 128
        assert counts["lengths"] == list(range(K_MAX + 1))
        assert counts["mixed"] > 20
        decided += counts["decided"]
        without_bonus += counts["ended_without_bonus"]
        kinds |= set(counts["pruned_kinds"])
        cut_layers |= set(counts["pruned_layers"])
        is_covered = kinds == KINDS and cut_layers == set(layers)
        if decided >= 1000 and without_bonus >= least_without_bonus and is_covered:
            return
    pytest.fail(
        f"{decided} request-steps in steps with a cut, {without_bonus} drafts ended without a bonus token; "
        f"cut were requests {sorted(kinds)} behind layers {sorted(cut_layers)}"
    )


@pytest.mark.slow  # `make proof`; test_sampling.py has the same at T > 0
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("method", "control"),
    [
        ("draft_model itself", ""),
        ("draft_model truncated", ""),
        ("eagle3", ""),
        ("draft_model truncated", "accept-all"),
    ],
)
def test_everything_on_together_changes_nothing(
    method: str, control: str, target: Path, truncated: Path, short_folder: Path, reference: dict[str, Any]
) -> None:
    """Lengths, stop rules, cuts and drafting ahead at random, by a real sidecar that is killed again and again.

    Everything that one engine can have at once.
    """
    result = run_gauntlet(
        short_folder, target, speculation(method, target, truncated), control, exit_layers=(1, 5, 14, 20, 28),
        frontier=K_MAX, is_killed=True,
    )  # fmt: skip
    if control:
        assert len(different(result, reference)) > 5
        return
    counts = result["counts"]
    print(f"what happened: {counts}")
    assert different(result, reference) == []
    assert result["faults"] == {}
    assert result["is_pruning"]
    # The comparison is worth something only if all of this happened.
    assert len(counts["epochs"]) >= 3, "no lease, and those of two lives"
    assert counts["under_lease"] > 20
    assert counts["records"] - counts["under_lease"] > 10
    assert counts["lengths"] == list(range(K_MAX + 1))
    assert counts["mixed"] > 20
    assert counts["stopped"] > 10
    assert counts["pruned_row_steps"] > 20
    assert counts["ended_without_bonus"] > 5
    assert counts["frontier_misses"] > 10
    assert counts["frontier_hits"] > 10 or method != "draft_model itself", "the other drafters are less often right"
    assert counts["chunked"] > 10
    assert counts["events"]["preempt"] >= 1
    assert counts["events"]["abort"] == ABORTED
    assert counts["excess"] == 0


@pytest.mark.slow  # `make proof`; test_ragged.py and test_frontier_engine.py have controls of the same kind
@pytest.mark.parametrize(
    ("method", "control"), [("ngram", "accept-all"), ("ngram", "neighbour"), ("eagle3", "accept-all")]
)
def test_the_comparison_fails_when_verification_is_broken(
    method: str, control: str, target: Path, truncated: Path, short_folder: Path, reference: dict[str, Any]
) -> None:
    result = run_gauntlet(short_folder, target, speculation(method, target, truncated), control)
    assert len(different(result, reference)) > 5
