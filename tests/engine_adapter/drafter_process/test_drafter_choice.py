"""Who gets a drafter process, and what the others are told."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from faser.engine_adapter.drafter_process import choice as drafter_choice
from faser.engine_adapter.drafter_process.choice import chosen_drafter, drafter_cores, states_of_target
from faser.engine_adapter.partition.shares import PartitionError

MINE = sorted(os.sched_getaffinity(0))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A configuration that gets one."""
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: True))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").touch()
    drafter = SimpleNamespace(dtype="torch.bfloat16", quantization=None, get_vocab_size=lambda: 64)
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="draft_model",
            model=str(tmp_path),
            draft_sample_method="greedy",
            draft_model_config=drafter,
            parallel_drafting=False,
        ),
        parallel_config=SimpleNamespace(world_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        model_config=SimpleNamespace(get_vocab_size=lambda: 64, model="/target", dtype="torch.float32"),
        use_v2_model_runner=False,
    )


def test_a_plain_draft_model_on_a_cpu_gets_its_process(config: Any, tmp_path: Path) -> None:
    command, reason = chosen_drafter("all", config)
    assert reason is None
    assert command == [sys.executable, "-m", "faser.engine_adapter.drafter_process.llama", str(tmp_path), "bfloat16"]


def test_cores_that_cannot_be_had_are_one_line_and_no_process(config: Any) -> None:
    absent = max(MINE) + 500
    assert chosen_drafter(str(MINE[-1]), config)[1] is None
    for text in (str(absent), f"{MINE[-1]},{absent}"):
        command, reason = chosen_drafter(text, config)
        assert command == []
        assert reason is not None
        assert reason.startswith(f"cores {text} for the drafter, of which {absent} cannot be had here; this process")
        assert "\n" not in reason
    assert sorted(os.sched_getaffinity(0)) == MINE


def test_an_eagle3_head_gets_its_process_and_the_targets_states(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_choice, "eagle_refusal", lambda head, target: None)
    monkeypatch.setattr(drafter_choice, "states_width", lambda head: 12)
    assert states_of_target(config) is None
    config.speculative_config.method = "eagle3"
    command, reason = chosen_drafter("all", config)
    assert reason is None
    assert command[2:] == [
        "faser.engine_adapter.drafter_process.eagle",
        str(tmp_path),
        "/target",
        "bfloat16",
        "float32",
    ]
    assert states_of_target(config) == (12, "float32")


def test_nothing_is_said_where_none_is_asked_for(config: Any) -> None:
    config.speculative_config = None
    assert chosen_drafter("", config) == ([], None)


@pytest.mark.parametrize(
    ("part", "name", "value", "seen"),
    [
        ("", "speculative_config", None, "method none"),
        ("speculative_config", "method", "eagle", "method eagle:"),
        ("speculative_config", "parallel_drafting", True, "parallel drafting"),
        ("speculative_config", "draft_sample_method", "probabilistic", "'probabilistic'"),
        ("parallel_config", "world_size", 2, "2 ranks"),
        ("scheduler_config", "async_scheduling", True, "async scheduling"),
        ("", "use_v2_model_runner", True, "V1 runner"),
        ("model_config", "get_vocab_size", lambda: 65, "vocabulary"),
        ("speculative_config", "model", "/nowhere", "/nowhere"),
    ],
)
def test_everybody_else_is_told_why_not_in_one_line(part: str, name: str, value: Any, seen: str, config: Any) -> None:
    setattr(getattr(config, part) if part else config, name, value)
    command, reason = chosen_drafter("1", config)
    assert command == []
    assert reason is not None
    assert seen in reason
    assert "\n" not in reason


def test_a_quantized_draft_model_is_refused(config: Any) -> None:
    config.speculative_config.draft_model_config.quantization = "awq"
    assert "awq" in (chosen_drafter("1", config)[1] or "")


def test_everywhere_is_no_partition() -> None:
    assert drafter_cores("all", 1) is None


@pytest.mark.skipif(len(MINE) < 2, reason="one core cannot be shared out")
def test_the_target_keeps_the_cores_that_the_drafter_does_not_get() -> None:
    partition = drafter_cores(str(MINE[-1]), 1)
    assert partition is not None
    assert partition.cores("draft") == (MINE[-1],)
    assert partition.cores("verify") == tuple(MINE[:-1])
    assert partition.is_disjoint


def test_each_of_the_targets_threads_needs_a_core() -> None:
    with pytest.raises(PartitionError, match="OMP_NUM_THREADS") as caught:
        drafter_cores(str(MINE[-1]), len(MINE))
    assert "\n" not in str(caught.value)
