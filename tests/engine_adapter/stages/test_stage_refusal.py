"""What keeps stages where they are, in one line; and which drafters a pipeline cannot have."""

from __future__ import annotations

from types import SimpleNamespace as Config
from typing import Any

import pytest

from faser.engine_adapter.stages import refusal
from faser.engine_adapter.stages.refusal import drafting_refusal, stages_refusal


def configured(**changes: Any) -> Any:
    """Return a configuration whose stages can move, but for these changes."""
    parts: dict[str, dict[str, Any]] = {
        "parallel_config": {
            "distributed_executor_backend": "mp", "tensor_parallel_size": 1, "data_parallel_size": 1, "nnodes": 1,
            "pipeline_parallel_size": 2,
        },
        "model_config": {
            "enforce_eager": True, "quantization": None, "hf_text_config": Config(num_hidden_layers=30),
        },
    }  # fmt: skip
    whole: dict[str, Any] = {
        "lora_config": None,
        "kv_transfer_config": None,
        "use_v2_model_runner": False,
        "speculative_config": None,
    }
    for name, value in changes.items():
        home = next((part for part in parts.values() if name in part), whole)
        home[name] = value
    return Config(**{name: Config(**part) for name, part in parts.items()}, **whole)


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal, "_device", lambda: "cpu")


def test_a_plain_pipeline_on_a_cpu_is_not_refused() -> None:
    assert stages_refusal(configured()) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"enforce_eager": False}, "compiled graphs, which keep their range of layers; pass --enforce-eager"),
        ({"lora_config": object()}, "a LoRA adapter; expected none"),
        ({"kv_transfer_config": object()}, "a KV connector; expected none"),
        ({"pipeline_parallel_size": 31}, "31 ranks for 30 layers; expected at most one rank for each layer"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2; expected 1"),
        ({"nnodes": 2}, "nnodes=2; expected 1, as all ranks read the weights from one host"),
        ({"quantization": "fp8"}, "quantization=fp8; expected none"),
        ({"use_v2_model_runner": True}, "use_v2_model_runner=True; expected the V1 runner"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend=ray; expected mp"),
    ],
)
def test_what_keeps_stages_where_they_are_is_said_in_one_line(change: dict[str, Any], said: str) -> None:
    reason = stages_refusal(configured(**change))
    assert reason is not None
    assert reason.startswith(said)
    assert "\n" not in reason


def test_on_a_gpu_stages_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal, "_device", lambda: "cuda")
    assert stages_refusal(configured()) == "device=cuda; expected cpu"


@pytest.mark.parametrize(
    ("ranks", "method", "is_refused"),
    [(2, "eagle3", True), (2, "draft_model", True), (2, "ngram", False), (1, "eagle3", False)],
)
def test_a_pipeline_drafts_out_of_the_text_alone(ranks: int, method: str, is_refused: bool) -> None:
    config = configured(pipeline_parallel_size=ranks, speculative_config=Config(method=method))
    reason = drafting_refusal(config)
    assert (reason is not None) is is_refused
    assert not is_refused or f"method {method} with pipeline_parallel_size=2" in str(reason)


def test_a_pipeline_without_speculation_is_not_refused() -> None:
    assert drafting_refusal(configured()) is None
