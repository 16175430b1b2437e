"""What cannot be had together is refused by the code exactly where the table in the documents says so."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace as Config
from typing import Any

import pytest

import faser
from faser.engine_adapter import hello
from faser.engine_adapter.drafter_process.choice import chosen_drafter
from faser.engine_adapter.matching.choice import match_refusal
from faser.engine_adapter.overlap import splits
from faser.engine_adapter.overlap.splits import can_deal_groups, chosen_splits, no_groups_reason
from faser.engine_adapter.partition.cpu import CpuDevice
from faser.engine_adapter.partition.shares import opened
from faser.engine_adapter.pruning.exit_file import pruning_refusal
from faser.engine_adapter.settings import Settings, load_settings
from faser.engine_adapter.stages import refusal
from faser.engine_adapter.stages.refusal import drafting_refusal, stages_refusal

PAGE = Path(faser.__file__).parent / "docs" / "design" / "combinations.md"


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Everything that can be had on the V1 runner: a draft model, one rank, a CPU, nothing compiled."""
    platform = Config(is_cpu=lambda: True, device_type="cpu")
    monkeypatch.setitem(sys.modules, "vllm.platforms", Config(current_platform=platform))
    monkeypatch.setattr(refusal, "_device", lambda: "cpu")
    monkeypatch.setattr(splits, "shares_of_gpu", lambda names: opened(CpuDevice(), names))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").touch()
    drafter = Config(
        dtype="torch.float32",
        quantization=None,
        get_vocab_size=lambda: 64,
        is_moe=False,
        use_mla=False,
        model=str(tmp_path),
    )
    return Config(
        speculative_config=Config(
            method="draft_model", model=str(tmp_path), draft_sample_method="greedy", draft_model_config=drafter,
            parallel_drafting=False, rejection_sample_method="standard", enable_adaptive_verification=False,
        ),
        parallel_config=Config(
            world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, nnodes=1,
            distributed_executor_backend="mp",
        ),
        scheduler_config=Config(async_scheduling=False),
        compilation_config=Config(mode=0, cudagraph_mode=Config(name="NONE"), cudagraph_capture_sizes=[]),
        model_config=Config(
            architectures=["LlamaForCausalLM"], get_vocab_size=lambda: 64, model="/target", dtype="torch.float32",
            enforce_eager=True, quantization=None, is_moe=False, use_mla=False,
            hf_text_config=Config(num_hidden_layers=30),
        ),
        device_config=Config(device_type="cpu"), lora_config=None, kv_transfer_config=None, use_v2_model_runner=False,
    )  # fmt: skip


def tables() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the two tables of the page, cells by row."""
    found: list[dict[str, list[str]]] = []
    for part in PAGE.read_text().split("\n\n"):
        if part.startswith("|"):
            lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in part.splitlines()]
            found.append({cells[0]: cells[1:] for cells in lines[2:]})
    first, second = found
    return first, second


def splits_refusal(config: Any, settings: Settings) -> str | None:
    return next(iter(chosen_splits(settings, config).refused), None)


REFUSALS: list[Callable[[Any, Settings], str | None]] = [
    match_refusal,
    lambda config, _: pruning_refusal(config),
    lambda config, _: chosen_drafter("all", config)[1],
    lambda config, settings: no_groups_reason(replace(settings, drafter_cores="all"), config),
    splits_refusal,
    lambda config, _: stages_refusal(config) or drafting_refusal(staged(config)),
]


def staged(config: Any) -> Any:
    return Config(**vars(config) | {"parallel_config": Config(pipeline_parallel_size=2)})


ON_A_GPU: dict[str, Any] = {
    "use_v2_model_runner": True, "device_config.device_type": "cuda",
    "parallel_config.distributed_executor_backend": "uni",
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "V1, sync": {},
    "V1, async scheduling": {"scheduler_config.async_scheduling": True},
    "V2 runner": ON_A_GPU,
    "drafts drawn at random": {"speculative_config.draft_sample_method": "probabilistic"},
    "`ngram`": {"speculative_config.method": "ngram"},
    "tensor ranks": {"parallel_config.tensor_parallel_size": 2, "parallel_config.world_size": 2},
    "pipeline ranks": {"parallel_config.pipeline_parallel_size": 2, "parallel_config.world_size": 2},
    "compiled target": {"compilation_config.mode": 3, "model_config.enforce_eager": False},
    "LoRA": {"lora_config": object()},
    "a KV connector": {"kv_transfer_config": object()},
}


def changed(config: Any, changes: dict[str, Any]) -> Any:
    for path, value in changes.items():
        *homes, name = path.split(".")
        owner = config
        for home in homes:
            owner = getattr(owner, home)
        setattr(owner, name, value)
    return config


def test_the_page_has_every_row() -> None:
    assert list(tables()[1]) == list(CHANGES)


@pytest.mark.parametrize("row", list(CHANGES))
def test_what_vllm_does_beside_it_is_refused_where_the_table_says_no(engine: Any, row: str) -> None:
    config = changed(engine, CHANGES[row])
    settings = load_settings({"FASER_SPLITS": "1:1"})
    said = {}
    for place, (cell, refused) in enumerate(zip(tables()[1][row], REFUSALS, strict=True)):
        # Stages need ngram drafts or none; that word is the row's own where it is about drafts.
        is_stages = place == len(REFUSALS) - 1
        if is_stages and not row.startswith("drafts"):
            config.speculative_config.method = "ngram"
        said[place] = (cell.partition(":")[0], refused(config, settings))
    for cell, reason in said.values():
        assert cell in ("yes", "no")
        assert (reason is None) == (cell == "yes"), (row, reason)
        assert reason is None or "\n" not in reason


def test_pairs_that_are_not_to_be_had_are_refused(engine: Any) -> None:
    """Copies and splits beside a drafter's process, everything but copies beside a pipeline's ranks."""
    pairs = tables()[0]
    assert [pairs[row][1].partition(":")[0] for row in ("drafting ahead", "two groups")] == ["not", "not"]
    assert match_refusal(engine, load_settings({"FASER_DRAFTER_CORES": "all"})) is not None
    assert pairs["a split"][3].startswith("not")
    both = load_settings({"FASER_SPLITS": "1:1", "FASER_DRAFTER_CORES": "all"})
    assert "FASER_DRAFTER_CORES" in (splits_refusal(engine, both) or "")
    assert pairs["a split"][1] == "together"
    assert match_refusal(engine, load_settings({"FASER_SPLITS": "1:1"})) is None
    stages = [cell.partition(":")[0] for cell in pairs["stages that move"]]
    assert stages == ["not", "together", "not", "not", "not", "not"]
    ranks = changed(engine, CHANGES["pipeline ranks"] | {"speculative_config.method": "ngram"})
    found = [refused(ranks, load_settings({"FASER_SPLITS": "1:1"})) is None for refused in REFUSALS]
    assert found == [True, False, False, False, False, True]


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, None),
        ({"speculative_config.method": "ngram_gpu"}, "method ngram_gpu"),
        ({"speculative_config.enable_adaptive_verification": True}, "adaptive verification"),
        ({"speculative_config.draft_sample_method": "probabilistic"}, "'probabilistic'; expected 'greedy'"),
        ({"parallel_config.data_parallel_size": 2}, "2 ranks"),
        ({"lora_config": object()}, "LoRA"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"model_config.is_moe": True}, "/target: kernels of experts"),
        ({"model_config.use_mla": True}, "/target: kernels of experts, MLA"),
        ({"model_config.quantization": "fp8"}, "/target: kernels of experts, MLA or quantized weights"),
        ({"scheduler_config.async_scheduling": True}, None),
    ],
)
def test_groups_on_the_v2_runner_are_refused_in_one_line(
    engine: Any, changes: dict[str, Any], seen: str | None
) -> None:
    config = changed(engine, {"use_v2_model_runner": True} | changes)
    reason = no_groups_reason(load_settings({"FASER_PING_PONG": "always"}), config)
    assert (reason is None) == (seen is None)
    assert (seen or "") in (reason or "")
    assert "\n" not in (reason or "")
    assert can_deal_groups(load_settings({"FASER_PING_PONG": "auto"}), config) == (seen is None)
    on_a_gpu = changed(engine, ON_A_GPU | changes)
    refused = splits_refusal(on_a_gpu, load_settings({"FASER_SPLITS": "1:1"}))
    assert (refused is None) == (seen is None)
    assert (seen or "") in (refused or "")
    assert not can_deal_groups(load_settings({}), config)


def test_nothing_is_pruned_where_groups_can_be(engine: Any, monkeypatch: pytest.MonkeyPatch, vllm_log: Any) -> None:
    """HELLO then offers no exits, and the log says why."""
    pairs, facts = tables()[0], object()
    assert [pairs[row][2] for row in ("two groups", "a split")] == ["not", "not"]
    assert pairs["drafting ahead"][2].startswith("by step")
    monkeypatch.setattr(hello, "usable_exits", lambda *_: (facts, None))
    apart = {"FASER_DRAFTER_CORES": "all"}
    for given in ({}, apart, {"FASER_PING_PONG": "always"}):
        assert hello._exits(engine, load_settings(given)) is facts
    assert vllm_log.getvalue() == ""
    for given in ({"FASER_SPLITS": "1:1"}, apart | {"FASER_PING_PONG": "auto"}):
        assert hello._exits(engine, load_settings(given)) is None
    assert (
        vllm_log.getvalue().count("FASER does not prune: nothing is where requests can be dealt into two groups") == 2
    )
