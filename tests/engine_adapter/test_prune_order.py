"""When pruning takes force, what counts as accepted beside it, and which engines refuse it."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from faser.engine_adapter import exits
from faser.engine_adapter import protocol as wire
from faser.engine_adapter.lease import Lease
from faser.engine_adapter.steering import Default, Steering


class SilentLink:
    """A link that delivers what the test puts into `arrived` and sends nothing."""

    def __init__(self) -> None:
        self.arrived: list[Any] = []
        self.dropped = 0
        self.refused: Counter[str] = Counter()

    def send(self, message: object) -> None:
        """Forget it."""

    def send_later(self, make: object) -> None:
        """Forget it."""

    def receive(self) -> list[Any]:
        """Return what arrived."""
        taken, self.arrived = self.arrived, []
        return taken

    def close(self, wait_s: float = 0.0) -> None:
        """Nothing to close."""


def act(sequence: int, prune: wire.Prune | None) -> wire.ActionSet:
    return wire.ActionSet("boot", 1, sequence, 1000, time.monotonic() + 60, 2, [], [], prune=prune)


def test_a_lease_prunes_the_drafts_that_were_drawn_under_it_and_no_earlier_ones() -> None:
    """Else it could depend on the tokens that it cuts: it may have been decided after they were drawn."""
    link = SilentLink()
    hello: Any = SimpleNamespace(is_async=False, boot_id="boot", frontier=0)
    adapter = Steering(hello, link, Lease("boot", 6, 32, 60.0, (10, 20)), Default(0))  # type: ignore[arg-type]
    orders = []
    for sequence, prune in enumerate((None, wire.Prune(10, 0.1), wire.Prune(20, 0.2), None, None), start=1):
        link.arrived = [act(sequence, prune)]
        orders.append(adapter.order({}, 0.0).prune)
    assert orders == [None, None, wire.Prune(10, 0.1), wire.Prune(20, 0.2), None]


def config(**changed: Any) -> Any:
    values: dict[str, Any] = {
        "method": "eagle3", "architecture": "LlamaForCausalLM", "use_v2": False, "is_async": False, "mode": 0,
        "tensor": 1, "lora": None, "kv": None,
    } | changed  # fmt: skip
    return SimpleNamespace(
        speculative_config=values["method"] and SimpleNamespace(method=values["method"]),
        model_config=SimpleNamespace(architectures=[values["architecture"]]),
        use_v2_model_runner=values["use_v2"],
        scheduler_config=SimpleNamespace(async_scheduling=values["is_async"]),
        compilation_config=SimpleNamespace(mode=values["mode"]),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=values["tensor"], pipeline_parallel_size=1, data_parallel_size=1
        ),
        lora_config=values["lora"],
        kv_transfer_config=values["kv"],
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"method": None}, "speculative method None"),
        ({"method": "medusa"}, "speculative method 'medusa'"),
        ({"architecture": "MambaForCausalLM"}, "architecture MambaForCausalLM; expected one of LlamaForCausalLM"),
        ({"use_v2": True}, "V2 model runner"),
        ({"is_async": True}, "--no-async-scheduling"),
        ({"mode": 3}, "--enforce-eager"),
        ({"tensor": 2}, "several ranks"),
        ({"lora": object()}, "LoRA"),
        ({"kv": object()}, "KV connector"),
    ],
)
def test_what_cannot_be_pruned_is_refused_with_its_reason(changed: dict[str, Any], reason: str) -> None:
    refused = exits.pruning_refusal(config(**changed))
    assert refused is not None
    assert reason in refused
    assert "\n" not in refused
    assert exits.usable_exits("heads.safetensors", config(**changed)) == (None, refused)


def test_the_embedded_engine_is_not_refused() -> None:
    assert exits.pruning_refusal(config()) is None


def test_without_a_file_nothing_is_said() -> None:
    assert exits.usable_exits("", config(method=None)) == (None, None)
