"""The stand-in for the sidecar inside a test's engine logs every step, also of requests that have left."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from faser.engine_adapter.steering import steering
from faser.engine_adapter.steering.lease import Lease
from faser.engine_adapter.steering.orders import StepReport
from faser.engine_adapter.steering.sampled_tokens import SampledTokens
from faser.engine_adapter.steering.steering import BatchOutcome, Default, Steering


class Nobody:
    """A link to nobody."""

    def send_later(self, *_: object) -> None: ...

    def receive(self) -> list[Any]:
        return []


class Request:
    num_output_tokens, num_computed_tokens, num_prompt_tokens, max_tokens, priority = 1, 10, 10, 99, 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("order", "record"):  # which a driver replaces for good
        monkeypatch.setattr(Steering, name, getattr(Steering, name))
    monkeypatch.setattr(steering, "latched", steering.latched)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return import_module("engine_child").Driver()


def test_a_step_reported_after_its_request_left_is_logged(driver: Any) -> None:
    hello: Any = type("Hello", (), {"boot_id": "b", "is_async": True, "frontier": 0, "splits": ["unsplit"]})
    link: Any = Nobody()
    adapter = Steering(hello, link, Lease("b", 4, 32, 1.0, []), Default(0))
    for name in ("a", "b"):
        request: Any = Request()
        adapter.arrive(name, request)
    driver.runner, scheduled = type("Runner", (), {"drafter": None}), {"a": 1, "b": 1}
    in_flight = [adapter.order(scheduled, 0.0) for _ in range(2)]
    for order in in_flight:
        adapter.leave("a", is_abort=False)
        rows, report = {"a": 0, "b": 1}, StepReport(drafted=[0, 0])
        outcome = BatchOutcome(scheduled, {}, rows, SampledTokens([1, 1], []), {"b": 1}, 2, 0, 0.0, report)
        adapter.record(order, outcome)
    assert "a" not in adapter.entries
    assert [step["handles"] for step in driver.log] == [[1, 2], [1, 2]]
