"""When pruning takes force, what counts as accepted beside it, and which engines refuse it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from faser.engine_adapter import protocol as wire
from faser.engine_adapter.pruning import exit_file as exits
from faser.engine_adapter.pruning.runner import PruningRunner
from faser.engine_adapter.scheduler import SteeredScheduler
from faser.engine_adapter.steering.lease import Lease
from faser.engine_adapter.steering.orders import StepOrder
from faser.engine_adapter.steering.steering import Default, Steering


class SilentLink:
    """A link that delivers what the test puts into `arrived` and sends nothing."""

    def __init__(self) -> None:
        self.arrived: list[Any] = []
        self.dropped = 0
        self.refused: Counter[str] = Counter()

    def send(self, message: object) -> None:
        """Forget it."""

    def send_later(self, make: object, rest_s: float = 0.0) -> None:
        """Forget it."""

    def receive(self) -> list[Any]:
        """Return what arrived."""
        taken, self.arrived = self.arrived, []
        return taken

    def close(self, wait_s: float = 0.0) -> None:
        """Nothing to close."""


def test_heads_that_need_candidates_are_refused_beside_ngram(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an engine would announce them, and prune in no step."""
    monkeypatch.setattr(exits, "check_model", lambda *_: None)
    text = SimpleNamespace(num_hidden_layers=6, hidden_size=8, vocab_size=9)
    for method, candidates, is_usable in (("ngram", 8, False), ("ngram", 0, True), ("eagle3", 8, True)):
        facts = exits.ExitFacts((2,), 6, 8, 9, candidates)
        monkeypatch.setattr(exits, "read_facts", lambda path, facts=facts: facts)
        asked = config(method=method)
        asked.model_config.hf_text_config = text
        found, reason = exits.usable_exits("heads.safetensors", asked)
        assert (found is not None) == is_usable
        assert is_usable or "ngram names none; expected one of draft_model, eagle, eagle3" in str(reason)


def act(sequence: int, prune: wire.Prune | None) -> wire.ActionSet:
    return wire.ActionSet("boot", 1, sequence, 1000, time.monotonic() + 60, 2, [], [], prune=prune)


def test_a_lease_prunes_the_drafts_that_were_drawn_under_it_and_no_earlier_ones() -> None:
    """Else it could depend on the tokens that it cuts: it may have been decided after they were drawn."""
    link = SilentLink()
    hello: Any = SimpleNamespace(is_async=False, boot_id="boot", frontier=0, splits=["unsplit"])
    adapter = Steering(hello, link, Lease("boot", 6, 32, 60.0, (10, 20)), Default(0))  # type: ignore[arg-type]
    orders = []
    for sequence, prune in enumerate((None, wire.Prune(10, 0.1), wire.Prune(20, 0.2), None, None), start=1):
        link.arrived = [act(sequence, prune)]
        orders.append(adapter.order({}, 0.0))
    asked = [None, wire.Prune(10, 0.1), wire.Prune(20, 0.2), None, None]
    assert [order.prune for order in orders] == [None, *asked[:-1]]
    assert [order.next_prune for order in orders] == asked


def config(**changed: Any) -> Any:
    values: dict[str, Any] = {
        "method": "eagle3", "architecture": "LlamaForCausalLM", "use_v2": False, "is_async": False, "mode": 0,
        "tensor": 1, "lora": None, "kv": None, "rule": "standard", "is_adaptive": False, "graphs": "NONE",
    } | changed  # fmt: skip
    drafting = SimpleNamespace(
        method=values["method"],
        rejection_sample_method=values["rule"],
        enable_adaptive_verification=values["is_adaptive"],
    )
    return SimpleNamespace(
        speculative_config=drafting if values["method"] else None,
        model_config=SimpleNamespace(architectures=[values["architecture"]]),
        use_v2_model_runner=values["use_v2"],
        scheduler_config=SimpleNamespace(async_scheduling=values["is_async"]),
        compilation_config=SimpleNamespace(
            mode=values["mode"],
            cudagraph_mode=SimpleNamespace(name=values["graphs"]),
            cudagraph_capture_sizes=[8],
        ),
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
        ({"architecture": "DeepseekV3ForCausalLM", "use_v2": True}, "architecture DeepseekV3ForCausalLM; expected"),
        ({"use_v2": True, "graphs": "PIECEWISE"}, "start with -cc.cudagraph_mode=FULL_DECODE_ONLY"),
        ({"use_v2": True, "mode": 3}, "a compiled target; start with -cc.mode=0, which keeps full CUDA graphs"),
        ({"use_v2": True, "rule": "synthetic"}, "rejection_sample_method=synthetic"),
        ({"use_v2": True, "is_adaptive": True}, "adaptive verification"),
        ({"use_v2": True, "method": "dspark"}, "speculative method 'dspark'"),
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


@pytest.mark.parametrize("graphs", ["NONE", "FULL", "FULL_DECODE_ONLY"])
def test_on_cuda_only_the_v2_runner_prunes_with_full_graphs_or_none(
    graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm.platforms

    asked = {"graphs": graphs, "is_async": True}
    for device, is_cuda in (("cuda", True), ("xpu", False)):
        platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda is_cuda=is_cuda: is_cuda, device_type=device)
        monkeypatch.setattr(vllm.platforms, "current_platform", platform)
        refused = [exits.pruning_refusal(config(use_v2=is_v2, **asked)) for is_v2 in (True, False)]
        expected = f"device {device}; expected a CPU, or CUDA with vLLM's V2 runner"
        assert refused == [None if is_cuda else expected, expected]


@pytest.mark.parametrize("is_async", [False, True])
def test_on_v2_asynchronous_scheduling_is_not_refused(is_async: bool) -> None:
    """Nothing waits for the device there."""
    assert exits.pruning_refusal(config(use_v2=True, is_async=is_async)) is None
    assert exits.pruning_refusal(config(use_v2=True, is_async=is_async, method="ngram_gpu")) is None


def test_without_a_file_nothing_is_said() -> None:
    assert exits.usable_exits("", config(method=None)) == (None, None)


# --- at the engine's start: whatever cannot be used is one line in the log, and speculation goes on ---


class Engine:
    """As much of vLLM's runner as pruning looks at when it starts."""

    def __init__(self, backend: str, groups: int, decoder: str, **changed: Any) -> None:
        self.vllm_config = config(**changed)
        name = staticmethod(lambda: backend)
        self.attn_groups = [[SimpleNamespace(backend=type("Backend", (), {"get_name": name}))]]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None] * groups)
        self.drafter = SimpleNamespace(candidates=0)
        self.decoder, self.started = decoder, 0
        self.input_batch = SimpleNamespace(num_reqs=3, req_ids=["a", "b", "c"])

    def initialize_kv_cache(self) -> None:
        """Count it."""
        self.started += 1

    def execute_model(self) -> None:
        """Begin a step of three requests."""

    def propose_draft_token_ids(self) -> list[int]:
        """Draft; say how many candidates are noted."""
        return [self.drafter.candidates]

    def get_model(self) -> Any:
        """Return a model of four layers whose LM head is all zeros."""
        import torch

        shape = SimpleNamespace(num_hidden_layers=4, hidden_size=8, vocab_size=16)
        head = SimpleNamespace(weight=torch.zeros(16, 8))
        decoder = type(self.decoder, (), {"__module__": "vllm.model_executor.models.llama", "layers": ()})()
        return SimpleNamespace(config=shape, lm_head=head, model=decoder)


class PruningEngine(PruningRunner, Engine):
    """FASER's mixin in front."""


def heads_file(folder: Path, target_layers: int = 4, layer: int = 2, fingerprint: float = 0.0) -> str:
    parts = {"scale": (8,), "down": (2, 8), "up": (8, 2), "bias": (8,), "probe": (8,), "weights": (8,)}
    tensors = {f"{layer}.{name}": np.zeros(shape, np.float32) for name, shape in parts.items()}
    said = {"format": exits.FORMAT, "layers": f"{layer}", "target_layers": f"{target_layers}", "hidden_size": "8"}
    said |= {"vocabulary": "16", "candidates": "4"}
    file = folder / "exits.safetensors"
    save_file(tensors | {"fingerprint": np.full((2, 2), fingerprint, np.float32)}, file, said)
    return str(file)


def start(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, **given: Any
) -> tuple[Any, str]:
    """Return the engine that was started, and what it logged."""
    monkeypatch.setenv("FASER_EXIT_HEADS", path)
    engine = PruningEngine(**({"backend": "CPU_ATTN", "groups": 1, "decoder": "LlamaModel"} | given))
    logger = logging.getLogger("vllm.faser.engine_adapter.pruning.runner")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    with caplog.at_level(logging.INFO, logger.name):
        engine.initialize_kv_cache()
    return engine, "\n".join(caplog.messages)


@pytest.mark.parametrize(("setting", "has_gate"), [(None, True), ("auto", True), ("always", False)])
def test_the_gate_has_its_say_unless_the_operator_wants_pruning_always(
    setting: str | None,
    has_gate: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if setting is not None:
        monkeypatch.setenv("FASER_PRUNE", setting)
    engine, _said = start(heads_file(tmp_path), monkeypatch, caplog)
    assert engine.pruning is not None
    assert (engine.gate is not None) is has_gate


@pytest.mark.parametrize(
    ("file", "given", "said"),
    [
        ({"target_layers": 5}, {}, "is for a model of 5 layers, hidden size 8 and vocabulary 16; this one has 4"),
        ({"layer": 4}, {}, "has heads behind layers (4,), expected 1 to 3"),
        ({"fingerprint": 1.0}, {}, "was trained on another model of the same shape; train its own"),
        (None, {}, "expected exit heads, as `faser exits train` writes them"),
        ({}, {"architecture": "MambaForCausalLM"}, "architecture MambaForCausalLM; expected one of LlamaForCausalLM"),
        ({}, {"decoder": "OtherModel"}, "with OtherModel cannot be pruned; known are LlamaModel"),
        ({}, {"backend": "FLASH_ATTN"}, "attention backend FLASH_ATTN; expected CPU_ATTN"),
        ({}, {"groups": 2}, "the KV cache has 2 groups, expected one"),
        ({}, {"mode": 3}, "a compiled target; start with --enforce-eager"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line_at_start_and_the_engine_goes_on(
    file: dict[str, Any] | None, given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    path = str(tmp_path / "none") if file is None else heads_file(tmp_path, **file)
    engine, told = start(path, monkeypatch, caplog, **given)
    assert told.startswith("FASER does not prune: ")
    assert said in told
    assert "\n" not in told
    assert engine.started == 1
    assert engine.pruning is None
    assert engine.prune_forward(lambda: "every row") == "every row"


def test_what_fits_is_said_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, told = start(heads_file(tmp_path), monkeypatch, caplog)
    assert told == "FASER may prune behind layers 2"
    assert engine.pruning is not None


class ScriptedGate:
    """A gate whose answers are given; what it is told is kept."""

    def __init__(self, answers: list[bool]) -> None:
        self.answers, self.told = answers, []  # type: tuple[list[bool], list[bool]]

    def ask(self, requests: int) -> bool:
        """Answer."""
        assert requests == 3
        return self.answers.pop(0)

    def note(self, requests: int, has_used: bool, time_s: float, tokens: int) -> None:
        """Keep which kind of step it was."""
        assert (requests, time_s, tokens) == (3, 0.5, 4)
        self.told.append(has_used)


ANSWERS = [False, True, True, False, False, True]
PRUNE = wire.Prune(2, 0.5)


@pytest.mark.parametrize(
    ("answers", "next_prune", "is_on", "noted"),
    [
        (ANSWERS, PRUNE, True, [4 if may_prune else 0 for may_prune in ANSWERS]),
        (None, PRUNE, True, [4] * 6),  # no gate
        (None, None, True, [0] * 6),  # nobody asks for pruning
        (None, wire.Prune(3, 0.5), True, [0] * 6),  # or where there is no head
        (None, PRUNE, False, [0] * 6),  # after a failure
    ],
)
def test_the_drafter_notes_candidates_only_for_a_verification_that_may_be_pruned(
    answers: list[bool] | None, next_prune: wire.Prune | None, is_on: bool, noted: list[int], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    engine, _said = start(heads_file(tmp_path), monkeypatch, caplog)
    engine.gate = None if answers is None else ScriptedGate(list(answers))
    engine.pruning.is_on = is_on
    seen = []
    for _ in ANSWERS:
        engine.order = StepOrder({}, next_prune=next_prune)
        engine.execute_model()
        seen += engine.propose_draft_token_ids()
    assert seen == noted


@pytest.mark.parametrize(("has_book", "told"), [(True, [True, False]), (False, [])])
def test_the_gate_hears_of_steps_that_could_have_been_either(
    has_book: bool, told: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _said = start(heads_file(tmp_path), monkeypatch, caplog)
    engine.gate = gate = ScriptedGate([True, True, False, False, True, True])
    monkeypatch.setattr("faser.engine_adapter.pruning.forward.tracks_thinking", lambda _runner: False)
    # What a step with pruning does is played: it is open where the drafter noted anything.
    engine.pruning.open = lambda _prune, _metadata, _common, notes: notes is not None
    opened = []
    for has_notes in (False, has_book, has_book, False, False, False):
        engine.execute_model()
        engine.order, engine._could_note = StepOrder({}, prune=PRUNE), has_book
        engine.verified = SimpleNamespace(num_draft_tokens=[2, 1, 0])
        engine.common, engine._notes = SimpleNamespace(num_actual_tokens=6), "notes" if has_notes else None
        opened.append(engine._opens(engine.pruning))
        engine.note_step(0.5, [[1], [2, 3], [4]])
    # In force are the answers of the step before, for the drafts verified now were drawn then.
    assert opened == [False, has_book, has_book, False, False, False]
    # Not told: steps whose notes, or whose next drafts' notes, are of the other kind; the last, which was to be pruned.
    assert gate.told == told


def test_groups_that_take_turns_are_not_pruned_and_nothing_is_noted_for_it() -> None:
    """A draft that waits for its turn is older than the order of the step that verifies it."""
    scheduler: Any = SteeredScheduler()
    order = StepOrder({"a": 2}, prune=PRUNE, next_prune=PRUNE)
    scheduler.steering = SimpleNamespace(order=lambda *_: order, cost_s=0.0)
    scheduler.ping_pong = SimpleNamespace(
        latch=lambda step, lengths: lengths, is_deferred=True, in_force=lambda split: split
    )
    scheduler.before_latch(output := SimpleNamespace(num_scheduled_tokens={"a": 3}))
    assert output.faser is order
    assert (order.prune, order.next_prune, order.is_deferred) == (None, None, True)


def test_recording_needs_no_lease_and_has_every_draft_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from faser.models.exits.record import _Recorder

    engine, _said = start(heads_file(tmp_path), monkeypatch, caplog)
    monkeypatch.setattr("faser.engine_adapter.pruning.forward.tracks_thinking", lambda _runner: False)
    engine.pruning, engine.gate = _Recorder(engine, (), 6), None
    asked = []
    engine.pruning.open = lambda *given: asked.append(given) or True
    engine.order = StepOrder({})
    engine.execute_model()
    assert engine.propose_draft_token_ids() == [6]
    engine.verified, engine.common = SimpleNamespace(num_draft_tokens=[2]), SimpleNamespace(num_actual_tokens=3)
    assert engine._opens(engine.pruning)
    assert len(asked) == 1
