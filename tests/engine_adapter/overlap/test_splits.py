"""Which splits are offered, and what is said where none can be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from faser.engine_adapter.overlap import splits
from faser.engine_adapter.overlap.ping_pong import chosen_groups
from faser.engine_adapter.overlap.splits import are_offered, chosen_splits
from faser.engine_adapter.partition.cuda import CudaDevice
from faser.engine_adapter.partition.shares import opened
from faser.engine_adapter.settings import load_settings

from ..late_device import LateCuda, LateDevice
from ..partition.test_partition_cuda import Driver

CONFIG: Any = SimpleNamespace(use_v2_model_runner=False)
ENDPOINT = {"FASER_ENDPOINT": "inproc://x"}
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be split")


@pytest.fixture(autouse=True)
def drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that can have a process, and whose threads are bound to nothing."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setattr(splits, "chosen_drafter", lambda cores, config: (["drafter"], None))


def settings(**given: str) -> Any:
    return load_settings(ENDPOINT | given)


def test_by_default_nothing_but_unsplit_is_offered_and_nothing_said() -> None:
    found = chosen_splits(settings(), CONFIG)
    assert (found.names, found.refused) == (["unsplit"], ())
    assert not are_offered(found)


@needs_two_cores
def test_what_is_named_is_offered_behind_unsplit() -> None:
    found = chosen_splits(settings(FASER_SPLITS=" 1:1,"), CONFIG)
    assert (found.names, found.refused) == (["unsplit", "1:1"], ())
    groups = chosen_groups(settings(FASER_SPLITS="1:1"), CONFIG)
    assert groups is not None
    assert (groups.by_split, groups.mode) == (True, "auto")


@needs_two_cores
@pytest.mark.parametrize("name", ["2:x", "half", "streams", "1:99"])
def test_a_split_that_nothing_can_be_made_of_is_one_line_and_the_others_stay(name: str) -> None:
    found = chosen_splits(settings(FASER_SPLITS=f"{name},1:1"), CONFIG)
    assert found.names == ["unsplit", "1:1"]
    assert len(found.refused) == 1
    assert name in found.refused[0]


def test_fewer_than_two_cores_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    found = chosen_splits(settings(FASER_SPLITS="1:1"), CONFIG)
    assert found.names == ["unsplit"]
    assert "0.5 of 1 cores" in found.refused[0]


def test_no_process_and_settled_cores_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings(FASER_SPLITS="1:1")
    settled = chosen_splits(settings(FASER_SPLITS="1:1", FASER_DRAFTER_CORES="1"), CONFIG)
    assert (settled.names, len(settled.refused)) == (["unsplit"], 1)
    assert "FASER_DRAFTER_CORES" in settled.refused[0]
    monkeypatch.setattr(splits, "chosen_drafter", lambda cores, config: ([], "method ngram: it has no drafter"))
    assert chosen_splits(asked, CONFIG).refused == ("method ngram: it has no drafter",)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    assert "nobind" in chosen_splits(asked, CONFIG).refused[0]


GPU: Any = SimpleNamespace(
    use_v2_model_runner=True,
    device_config=SimpleNamespace(device_type="cuda"),
    parallel_config=SimpleNamespace(distributed_executor_backend="uni"),
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 132 SMs whose driver knows no green contexts: what is left are plain streams."""
    device = CudaDevice(cuda=LateCuda(LateDevice(0)), driver=Driver(failing="cuGreenCtxCreate"))
    monkeypatch.setattr(splits, "late_refusal", lambda config: None)
    monkeypatch.setattr(splits, "shares_of_gpu", lambda names: opened(device, names))


@pytest.mark.usefixtures("gpu")
def test_without_green_contexts_a_gpu_offers_streams_and_says_so_of_each_ratio() -> None:
    found = chosen_splits(settings(FASER_SPLITS="streams,1:7,1:1"), GPU)
    assert found.names == ["unsplit", "streams"]
    assert [line[:15] for line in found.refused] == ["partition '1:7'", "partition '1:1'"]
    assert all("no green contexts" in line for line in found.refused)
    groups = chosen_groups(settings(FASER_SPLITS="streams"), GPU)
    assert groups is not None
    assert (groups.by_split, groups.mode) == (True, "auto")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"device_config": SimpleNamespace(device_type="cpu")}, "device cpu"),
        ({"parallel_config": SimpleNamespace(distributed_executor_backend="mp")}, "executor mp"),
    ],
)
def test_where_sms_cannot_be_split_it_is_one_line(change: dict[str, Any], seen: str) -> None:
    config = SimpleNamespace(**vars(GPU) | change)
    found = chosen_splits(settings(FASER_SPLITS="streams"), config)
    assert (found.names, len(found.refused)) == (["unsplit"], 1)
    assert seen in found.refused[0]


def test_what_a_drafter_cannot_do_beside_the_target_goes_for_splits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "late_refusal", lambda config: "LoRA")
    assert chosen_splits(settings(FASER_SPLITS="streams"), GPU).refused == ("LoRA",)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The driver's fakes in the place of CUDA."""
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr(
        splits, "CudaDevice", lambda index: CudaDevice(index, cuda=LateCuda(LateDevice(0)), driver=Driver())
    )
    splits.shares_of_gpu.cache_clear()
    yield
    splits.shares_of_gpu.cache_clear()


@pytest.mark.usefixtures("driver")
def test_a_process_opens_its_splits_once() -> None:
    found = splits.shares_of_gpu(("streams", "1:7"))
    assert (found.names, found.refused) == (["unsplit", "streams", "1:7"], ())
    assert splits.shares_of_gpu(("streams", "1:7")) is found, "HELLO and the runner have the same ones"


@pytest.mark.usefixtures("driver")
def test_a_driver_that_is_not_as_known_costs_splits_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "cuGreenCtxCreate", lambda self: pytest.fail("not reached"))  # another signature
    found = splits.shares_of_gpu(("streams", "1:7"))
    assert found.names == ["unsplit"]
    assert found.refused[0].startswith("TypeError while the GPU was split: ")


def test_what_the_runner_finds_out_is_what_hello_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "late_refusal", lambda config: None)
    monkeypatch.setattr(splits, "shares_of_gpu", lambda names: pytest.fail("not asked"))
    config = SimpleNamespace(**vars(GPU))
    splits.note_refusal(config, "attention by FLASHINFER")
    assert chosen_splits(settings(FASER_SPLITS="streams"), config).refused == ("attention by FLASHINFER",)
    assert splits.no_groups_reason(settings(FASER_PING_PONG="always"), config) == "attention by FLASHINFER"
