"""Pruning on the V2 runner at its start and in its steps: who may prune, and what the gate hears of it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from faser.engine_adapter import protocol as wire
from faser.engine_adapter.patches.pruning import PreparedStep, capped
from faser.engine_adapter.pruning import forward_v2, runner_v2
from faser.engine_adapter.steering.orders import StepOrder

from .test_prune_order import Engine, ScriptedGate, heads_file

PRUNE = wire.Prune(2, 0.5)


class EngineV2(Engine):
    """As much of vLLM's V2 runner as pruning looks at."""

    device = torch.device("cpu")

    def __init__(self, **given: Any) -> None:
        super().__init__(given["backend"], given["groups"], given["decoder"], use_v2=True)
        self.speculator = SimpleNamespace(
            acceptance_estimator=None, use_local_argmax_reduction=False, load_model=lambda target: None, max_num_reqs=3,
            num_speculative_steps=2, device="cpu",
        )  # fmt: skip

    def execute_model(self, scheduler_output: Any = None) -> None:
        """Begin a step of three requests."""


class Manager:
    """As much of vLLM's manager of graphs as is asked to replay one."""

    def run_fullgraph(self, desc: str) -> str:
        """Replay it."""
        return f"whole {desc}"


class PruningEngineV2(runner_v2.PruningRunnerV2, EngineV2):
    """FASER's mixin in front."""


def start(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, **given: Any
) -> tuple[Any, str]:
    """Return the engine that was started, and what it logged."""
    monkeypatch.setenv("FASER_EXIT_HEADS", path)
    monkeypatch.setattr(runner_v2, "refusal_v2", lambda runner: given.get("refusal"))
    monkeypatch.setattr(forward_v2, "own_groups", lambda runner, names: [])
    engine = PruningEngineV2(**({"backend": "CPU_ATTN", "groups": 1, "decoder": "LlamaModel"} | given))
    logger = logging.getLogger("vllm.faser.engine_adapter.pruning.runner_v2")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    with caplog.at_level(logging.INFO, logger.name):
        engine.initialize_kv_cache()
    return engine, "\n".join(caplog.messages)


def quantised(engine: Any) -> Any:
    """Return a model whose LM head has no plain weights."""
    model = Engine.get_model(engine)
    model.lm_head = SimpleNamespace()
    return model


@pytest.mark.parametrize(
    ("file", "given", "said"),
    [
        (None, {}, "expected exit heads, as `faser exits train` writes them"),
        ({"fingerprint": 1.0}, {}, "was trained on another model of the same shape; train its own"),
        ({}, {"decoder": "DeepseekV2Model"}, "with DeepseekV2Model cannot be pruned; known are LlamaModel"),
        ({}, {"backend": "FLEX_ATTENTION"}, "FLEX_ATTENTION; expected CPU_ATTN, FLASH_ATTN, TRITON_ATTN"),
        ({}, {"groups": 2}, "the KV cache has 2 groups, expected one"),
        ({}, {"refusal": "layers that share their KV cache"}, "layers that share their KV cache"),
        ({}, {"is_quantised": True}, "the target's LM head has no plain weights to take candidates from"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_one_line_at_start_and_the_engine_goes_on(
    file: dict[str, Any] | None, given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    if given.get("is_quantised"):
        monkeypatch.setattr(EngineV2, "get_model", quantised)
    path = str(tmp_path / "none") if file is None else heads_file(tmp_path, **file)
    engine, told = start(path, monkeypatch, caplog, **given)
    assert told.startswith("FASER does not prune: ")
    assert said in told
    assert "\n" not in told
    assert (engine.started, engine.pruning) == (1, None)
    engine.execute_model(SimpleNamespace(num_scheduled_tokens={"a": 1}))
    engine.prune_step(PreparedStep(None, None, torch.zeros(1)))
    assert engine.prune_sample(lambda: "sampled", None) == "sampled"


def test_what_fits_is_said_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, told = start(heads_file(tmp_path), monkeypatch, caplog)
    assert told == "FASER may prune behind layers 2"
    assert engine.pruning.heads.candidates == 4
    assert engine.pruning.could_open(PRUNE, SimpleNamespace(num_draft_tokens=3)) is False  # no logits were seen yet
    engine._candidates.is_on = True
    assert engine.pruning.could_open(PRUNE, SimpleNamespace(num_draft_tokens=3)) is True
    assert engine.pruning.could_open(wire.Prune(3, 0.5), SimpleNamespace(num_draft_tokens=3)) is False
    assert engine.pruning.could_open(None, SimpleNamespace(num_draft_tokens=3)) is False
    assert engine.pruning.could_open(PRUNE, SimpleNamespace(num_draft_tokens=0)) is False


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (None, ""),
        (ValueError("its full graphs replay one draft length"), "ValueError: its full graphs replay one draft length"),
        (torch.OutOfMemoryError("CUDA out of memory.\n  Tried"), "OutOfMemoryError: CUDA out of memory. Tried"),
    ],
)
def test_halves_are_captured_behind_vllms_graphs_and_what_they_take_is_told(
    fails: Exception | None, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    engine, _said = start(heads_file(tmp_path), monkeypatch, caplog)
    free, done = [1000, 700], []

    def capture() -> None:
        done.append("halves")
        if fails is not None:
            raise fails

    monkeypatch.setattr(
        EngineV2, "capture_model", lambda _, profile_only=False: done.append("vLLM") or 50, raising=False
    )
    monkeypatch.setattr(runner_v2, "free_bytes", lambda: free.pop(0))
    monkeypatch.setattr(runner_v2, "shapes_to_come", lambda _runner: 3)
    engine.cudagraph_manager = Manager()
    engine.pruning.capture, engine.pruning._halves = capture, {2: "measured"}
    caplog.clear()
    assert engine.capture_model(profile_only=True) == 50  # without graphs nothing is captured
    engine.vllm_config.compilation_config.cudagraph_mode.name = "FULL"
    to_come = 0 if told else 3 * 2 * runner_v2.GRAPH_BYTES  # in vLLM's measuring it captures a few alone
    assert engine.capture_model(profile_only=True) == 350 + to_come
    assert done == ["vLLM", "vLLM", "halves"]
    assert engine.pruning._halves == {}  # vLLM throws away what it measures with
    assert engine.cudagraph_manager.run_fullgraph("a") == "whole a"
    assert [message.partition("CUDA graph: ")[2] for message in caplog.messages] == ([told] if told else [])


def test_a_step_is_replayed_in_halves_once_and_only_in_a_shape_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM replays graphs beside its steps too, to warm up: nothing of a step may be written then."""
    engine, _said = start(heads_file(tmp_path), monkeypatch, caplog)
    pruning, replayed = engine.pruning, list[str]()
    monkeypatch.setattr(pruning, "_replay_halves", lambda step, halves, desc: replayed.append(desc))
    assert not pruning._replay("a")  # no step yet
    pruning._step = SimpleNamespace(is_replayed=False, prune=PRUNE)
    assert not pruning._replay("a")  # nothing was captured
    pruning._halves = {2: SimpleNamespace(has=lambda desc: desc == "a")}
    assert not pruning._replay("b")
    assert [pruning._replay("a"), pruning._replay("a")] == [True, False]
    assert replayed == ["a"]


class Clock:
    """A step's times: read from the step behind it on."""

    time_s = 0.0

    def seconds(self, first: str, last: str) -> float:
        """Return the time between two moments, 0.0 while it is not known."""
        assert (first, last) == ("begin", "end")
        return self.time_s


def test_the_gate_hears_of_steps_that_could_have_been_either_once_their_time_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _said = start(heads_file(tmp_path), monkeypatch, caplog)
    engine._candidates.is_on = True
    answers = [True, True, False, False, True, True]
    engine.prune_gate = gate = ScriptedGate(list(answers))
    opened, order = [], StepOrder({}, prune=PRUNE)
    engine.pruning.open = lambda prune, step: opened.append(prune)
    engine.pruning.told = lambda: "what a cut did"
    batch = SimpleNamespace(num_draft_tokens=3, num_tokens=6, num_reqs=3)
    beside_prompt = SimpleNamespace(num_draft_tokens=3, num_tokens=16, num_reqs=3)
    kinds, clocks = [], []
    for seen in (batch, batch, batch, beside_prompt, batch, batch):
        engine.order, engine.events = order, Clock()
        clocks.append(engine.events)
        engine.execute_model(SimpleNamespace(num_scheduled_tokens=dict.fromkeys("abc", 2)))
        before = len(opened)
        engine.prune_step(PreparedStep(seen, None, torch.zeros(1)))
        kinds.append(len(opened) > before)
        engine.prune_sample(lambda: (None, torch.tensor([1, 2, 1]), None), seen)
        for clock in clocks[:-1]:
            clock.time_s = 0.5  # the device is past all steps but the newest
    # In force are the answers of the step before, for the drafts verified now were drawn then; before the first: no.
    assert kinds == [False, True, True, False, False, True]
    # Not told: a step whose next drafts are noted of the other kind, one beside a prompt, and what is not known yet.
    assert gate.told == [True]


def test_a_step_that_nobody_looked_at_is_not_told_as_a_pruned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole graphs were replayed: both kinds of step would seem to take as long."""
    engine, _said = start(heads_file(tmp_path), monkeypatch, caplog)
    batch = SimpleNamespace(num_reqs=2)
    for trial, cut, heard in ((True, None, 0), (True, "told", 1), (False, None, 2)):
        engine.events, engine._trial = Clock(), trial
        engine.pruning.told = lambda cut=cut: cut
        engine.prune_gate = ScriptedGate([])
        engine.prune_sample(lambda: (None, torch.tensor([1, 2]), None), batch)
        assert len(engine._trials) == heard


def test_of_each_request_at_most_so_many_tokens_are_said() -> None:
    output = SimpleNamespace(num_sampled=None, num_rejected=None)
    sampled = output, torch.tensor([3, 1, 0, 5]), torch.tensor([2, 4, 0, 0])
    made, counts, rejected = capped(sampled, torch.tensor([2, 9, 9, 5]))
    assert counts.tolist() == made.num_sampled.tolist() == [2, 1, 0, 5]
    assert rejected.tolist() == made.num_rejected.tolist() == [3, 4, 0, 0]
