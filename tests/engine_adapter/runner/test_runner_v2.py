"""FASER's mixin on vLLM's real V2 runner code, with a simulated device: no CPU runs V2, so no test can do more.

`execute_model`, `sample_tokens`, `gather_batch_req_state` and `AsyncOutput` are the installed vLLM's own; model,
sampler, drafter, streams and events are fakes. A timing event that is waited for fails the test.
"""

import contextlib
import io
import pickle
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from faser.engine_adapter.steering.orders import StepOrder, StepReport

pytest.importorskip("vllm", reason="needs an installed vLLM")

K_MAX = 4
PREPARE_S, VERIFY_S, SAMPLE_S, ROUND_S = 0.001, 0.010, 0.002, 0.003

# What vLLM's runner owns besides what the tests are about: features that are off, and collaborators.
OFF = [
    *("aux_output_connector", "lora_config", "ubatch_runner", "pcp_manager", "adaptive_verification", "pp_handler"),
    *("batch_sharder", "structured_outputs_worker", "encoder_cache", "fast_prefill", "is_encoder_decoder"),
    *("uses_inputs_embeds", "use_pp", "check_ep_fault", "use_aux_hidden_state_outputs", "is_pooling_model"),
]
FAKED = [
    *("block_tables", "kv_connector", "ec_connector", "eplb", "sampler", "rejection_sampler", "kv_cache_config"),
    *("prompt_logprobs_worker", "draft_tokens_handler", "main_stream", "output_copy_stream", "attn_groups"),
    *("vllm_config", "parallel_config", "model_config", "cudagraph_manager", "input_buffers"),
]


@dataclass
class FakeDevice:
    """A stream: work is issued at once and done when somebody waits."""

    issued_s: float = 0.0
    done_s: float = 0.0
    is_broken: bool = False
    rounds: list[int | None] = field(default_factory=list)

    def work(self, seconds: float) -> None:
        self.issued_s += seconds

    def event(self, enable_timing: bool = False, blocking: bool = False) -> "FakeEvent":
        if enable_timing and self.is_broken:
            raise RuntimeError("no events today")
        return FakeEvent(self, enable_timing)


class FakeEvent:
    def __init__(self, device: FakeDevice, is_timing: bool) -> None:
        self.device, self.is_timing, self.at_s = device, is_timing, float("inf")

    def record(self, stream: object = None) -> None:
        self.at_s = self.device.issued_s

    def query(self) -> bool:
        return self.at_s <= self.device.done_s

    def synchronize(self) -> None:
        assert not self.is_timing, "FASER waited for the device"
        self.device.done_s = max(self.device.done_s, self.at_s)

    def elapsed_time(self, end: "FakeEvent") -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("both events must be completed")  # as CUDA does
        return (end.at_s - self.at_s) * 1000.0


@pytest.fixture(scope="module")
def v2() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own while vLLM is imported
        from vllm.v1.worker.gpu import model_runner

        return model_runner


@pytest.fixture
def device(v2: Any, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    import torch

    fake = FakeDevice()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(v2, "set_forward_context", lambda *a, **k: contextlib.nullcontext())
    monkeypatch.setattr(v2, "build_slot_mappings_by_layer", lambda *a: {})
    monkeypatch.setattr(v2, "dispatch_cg_and_sync_dp", dispatch)
    return fake


def dispatch(*_: Any, **__: Any) -> tuple[Any, None]:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens=64, num_reqs=None), None


class Model:
    """The target: takes its time and returns hidden states."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def __call__(self, **inputs: Any) -> Any:
        import torch

        self.device.work(VERIFY_S)
        return torch.zeros((64, 1))

    def compute_logits(self, hidden_states: Any) -> Any:
        return hidden_states


def make_speculator(device: FakeDevice, requests: int) -> Any:
    import torch
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class Speculator(BaseSpeculator):
        supports_mm_inputs = False

        def init_cudagraph_manager(self, cudagraph_mode: Any) -> None: ...

        def capture(self) -> None: ...

        def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            rounds = kwargs.get("num_speculative_tokens")
            device.rounds.append(rounds)
            device.work(ROUND_S * (K_MAX if rounds is None else rounds))
            return torch.arange(1, input_batch.num_reqs * K_MAX + 1).reshape(-1, K_MAX)

    return Speculator()


def make_runner(v2: Any, device: FakeDevice, device_type: str = "cuda", has_drafter: bool = True) -> Any:
    """Return a V2 runner with FASER's mixin whose collaborators are fakes."""
    import numpy as np
    import torch

    from faser.engine_adapter.runner.v2 import with_faser

    class Base(v2.GPUModelRunner):  # type: ignore[misc,name-defined]
        dp_size = dcp_size = 1

        def __init__(self) -> None:
            from vllm.v1.worker.gpu.async_utils import StepTimingCollector

            for name in OFF:
                setattr(self, name, None)
            for name in FAKED:
                setattr(self, name, MagicMock())
            self.device = SimpleNamespace(type=device_type)
            self.is_first_pp_rank = self.is_last_pp_rank = True
            self.num_speculative_steps = K_MAX
            self.decode_query_len = 1 + K_MAX
            self._draft_workspace_lane = 0
            self.execute_model_state = None
            self.speculative_config = SimpleNamespace(
                method="eagle3", num_speculative_tokens_per_batch_size=None, enable_adaptive_verification=False
            )
            self.speculator = make_speculator(device, 4) if has_drafter else None
            self.step_timing = StepTimingCollector()
            self.observability_config = SimpleNamespace(cudagraph_metrics=False)
            self.model_state = MagicMock(
                num_new_sampled_tokens_per_step=1, supports_mm_inputs=False, **{"prepare_inputs.return_value": {}}
            )
            self.model = Model(device)
            self.req_states = SimpleNamespace(
                req_id_to_index={"a": 2, "b": 0, "c": 1},
                prefill_len=SimpleNamespace(np=np.array([5, 5, 5, 0])),
                num_computed_prefill_tokens=np.array([5, 5, 5, 0]),
                num_computed_tokens=MagicMock(),
                prompt_len=MagicMock(),
                all_token_ids=MagicMock(),
                last_sampled_tokens=None,
                next_prefill_tokens=None,
                draft_tokens=torch.zeros((4, K_MAX), dtype=torch.int64),
            )
            self.prompt_logprobs_worker.compute_prompt_logprobs.return_value = {}
            self.prompt_logprobs_worker.compute_prompt_token_id_logprobs.return_value = {}
            self.kv_connector.post_forward.return_value = None
            self.ec_connector.maybe_get_output.return_value = contextlib.nullcontext()

        def update_requests(self, scheduler_output: Any) -> None:
            device.work(PREPARE_S)

        def add_requests(self, scheduler_output: Any) -> None: ...

        finish_requests = free_states = add_requests

        def update_pp_decode_requests(self) -> None: ...

        def postprocess_sampled(self, *args: Any, **kwargs: Any) -> None: ...

        def prepare_inputs(self, output: Any, state: Any, *args: Any) -> Any:
            device.work(PREPARE_S)
            self.state = state
            return SimpleNamespace(
                req_ids=state.req_ids,
                num_reqs=len(state.req_ids),
                num_tokens=state.num_tokens,
                num_tokens_after_padding=64,
                idx_mapping=torch.from_numpy(state.idx_mapping_np),
                num_scheduled_tokens=state.num_scheduled_tokens,
                prefill_len_np=state.prefill_len_np,
                num_computed_prefill_tokens_np=state.num_computed_prefill_tokens_np,
                input_ids=None,
                positions=None,
                is_padding=None,
                query_start_loc=None,
                has_structured_output_reqs=False,
            )

        def prepare_attn(self, input_batch: Any) -> tuple[Any, Any]:
            return (), torch.zeros(0)

        def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
            device.work(SAMPLE_S)
            count = torch.ones(input_batch.num_reqs, dtype=torch.int32)
            sampled = torch.arange(input_batch.num_reqs * (1 + K_MAX)).reshape(-1, 1 + K_MAX)
            output = SimpleNamespace(
                sampled_token_ids=sampled,
                num_sampled=count,
                num_rejected=count * 0,
                logprobs_tensors=None,
                num_nans=None,
                sampling_mask_tensors=None,
            )
            return output, count, count * 0

    return with_faser(Base)()


def scheduled(tokens: dict[str, int], drafts: dict[str, int], lengths: dict[str, int] | None, rounds: int) -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = tokens
    output.total_num_scheduled_tokens = sum(tokens.values())
    output.scheduled_spec_decode_tokens = {i: [-1] * count for i, count in drafts.items() if count}
    output.num_spec_tokens_to_schedule = rounds
    if lengths is not None:
        output.faser = StepOrder(lengths)  # type: ignore[attr-defined]
    return output


DECODE = {"a": 1, "b": 1, "c": 1}
LENGTHS = {"a": 0, "b": 3, "c": 1}


def run_step(runner: Any, lengths: dict[str, int] | None = LENGTHS, rounds: int = 3) -> Any:
    assert runner.execute_model(scheduled(DECODE, {}, lengths, rounds)) is None
    return runner.sample_tokens(None)


def test_verification_and_sampling_are_of_this_step_and_drafting_of_the_one_before(v2: Any, device: FakeDevice) -> None:
    runner = make_runner(v2, device)
    first = run_step(runner, rounds=3)
    second = run_step(runner, rounds=2)  # on the stream before the first step's tokens were fetched
    report: StepReport = first.get_output().faser
    assert (report.verify_s, report.sample_s) == pytest.approx((VERIFY_S, SAMPLE_S))
    assert (report.draft_s, report.runner_s) == (0.0, 0.0)
    report = second.get_output().faser
    assert (report.verify_s, report.sample_s) == pytest.approx((VERIFY_S, SAMPLE_S))
    assert report.draft_s == pytest.approx(3 * ROUND_S)
    assert report.runner_s == pytest.approx(2 * PREPARE_S + VERIFY_S + SAMPLE_S + 3 * ROUND_S)
    assert runner.faults == {}


def test_nothing_is_read_before_the_device_is_done(v2: Any, device: FakeDevice) -> None:
    from faser.engine_adapter.runner.v2 import StepEvents, fill_times

    events, report = StepEvents(lambda: device.event(enable_timing=True)), StepReport()
    for moment in ("begin", "forward", "verified", "logits", "sampled", "draft", "drafted", "end"):
        device.work(1.0)
        events.mark(moment)
    fill_times(report, events, events)
    assert report == StepReport()
    device.done_s = device.issued_s
    fill_times(report, events, events)
    assert (report.verify_s, report.sample_s, report.draft_s, report.runner_s) == (1.0, 1.0, 1.0, 7.0)


def test_placeholders_of_different_length_become_a_ragged_verification(v2: Any, device: FakeDevice) -> None:
    runner = make_runner(v2, device)
    runner.execute_model(scheduled({"a": 1, "b": 4, "c": 2}, {"b": 3, "c": 1}, LENGTHS, 3))
    drafts = dict(zip(runner.state.req_ids, runner.state.num_draft_tokens_np.tolist(), strict=True))
    assert drafts == {"a": 0, "b": 3, "c": 1}


def test_drafted_counts_follow_v2s_own_row_order(v2: Any, device: FakeDevice) -> None:
    runner = make_runner(v2, device)
    runner.execute_model(scheduled({"a": 1, "b": 4, "c": 2}, {"b": 3, "c": 1}, LENGTHS, 3))
    output = runner.sample_tokens(None).get_output()
    assert output.req_ids != ["a", "b", "c"]  # V2 sorts its batch: verifying requests first
    assert dict(zip(output.req_ids, output.faser.drafted, strict=True)) == LENGTHS


def test_drafts_stay_on_the_device_and_end_at_the_longest_length(v2: Any, device: FakeDevice) -> None:
    runner = make_runner(v2, device)
    run_step(runner, rounds=3)
    kept = runner.req_states.draft_tokens
    assert (kept[:3, :3] > 0).all()
    assert (kept[:3, 3:] == -1).all()
    assert device.rounds == [3]
    handed = runner.draft_tokens_handler.set_draft_tokens.call_args.args[1]
    assert tuple(handed.shape) == (3, 3)


def test_a_row_in_the_middle_of_its_prompt_drafts_nothing(v2: Any, device: FakeDevice) -> None:
    runner = make_runner(v2, device)
    runner.req_states.num_computed_prefill_tokens[0] = 1  # b: 3 of its 4 missing prompt tokens now
    runner.execute_model(scheduled({"a": 1, "b": 3, "c": 1}, {}, LENGTHS, 3))
    output = runner.sample_tokens(None).get_output()
    assert dict(zip(output.req_ids, output.faser.drafted, strict=True)) == {"a": 0, "b": 0, "c": 1}


def test_drafting_that_vllm_skips_is_reported_as_none(v2: Any, device: FakeDevice) -> None:
    runner = make_runner(v2, device)  # vLLM 0.33 drafts nothing where no request could use it
    assert run_step(runner, rounds=0).get_output().faser.drafted == [0, 0, 0]


def test_a_step_without_an_order_is_reported_without_drafts(v2: Any, device: FakeDevice) -> None:
    report = run_step(make_runner(v2, device), lengths=None).get_output().faser
    assert report.drafted == [0, 0, 0]
    assert report.verify_s == pytest.approx(VERIFY_S)


def test_an_engine_without_a_drafter_is_timed_too(v2: Any, device: FakeDevice) -> None:
    runner = make_runner(v2, device, has_drafter=False)
    runner.num_speculative_steps = 0
    report = run_step(runner, lengths={}, rounds=0).get_output().faser
    assert report.verify_s == pytest.approx(VERIFY_S)
    assert report.drafted == [0, 0, 0]


def test_dummy_runs_leave_no_mark(v2: Any, device: FakeDevice) -> None:
    runner = make_runner(v2, device)
    run_step(runner)
    order, previous = runner.order, runner.previous
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(v2.GPUModelRunner, "execute_model", lambda self, *a, **k: seen.append(self.events))
        runner.execute_model(scheduled(DECODE, {}, None, 0), dummy_run=True)
        runner.execute_model(scheduled(DECODE, {}, None, 0), None, True)
    runner.speculator.propose(SimpleNamespace(num_reqs=1), dummy_run=True)
    assert seen == [None, None]
    assert (runner.order, runner.previous, runner.rounds) == (order, previous, 3)


def test_without_cuda_nothing_is_timed(v2: Any, device: FakeDevice) -> None:
    device.is_broken = True  # an event that is made would raise
    runner = make_runner(v2, device, device_type="cpu")
    report = run_step(runner).get_output().faser
    assert (report.verify_s, report.runner_s, sorted(report.drafted)) == (0.0, 0.0, [0, 1, 3])
    assert runner.faults == {}


def test_a_failure_of_fasers_own_changes_nothing_and_is_logged_once(
    v2: Any, device: FakeDevice, vllm_log: io.StringIO
) -> None:
    runner = make_runner(v2, device)
    expected = run_step(runner).get_output().sampled_token_ids
    device.is_broken = True
    for _ in range(3):
        assert run_step(runner).get_output().sampled_token_ids == expected
    assert runner.faults["clock"] > 3
    assert vllm_log.getvalue().count("FASER's clock failed in the V2 model runner") == 1


def test_a_failing_set_up_leaves_vllms_runner(v2: Any, device: FakeDevice) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("faser.engine_adapter.runner.v2.before_forward", lambda *a: 1 / 0)
        runner = make_runner(v2, device)
    assert runner.faults == {"set-up": 1}
    assert run_step(runner).get_output().sampled_token_ids == [[0], [5], [10]]


def test_the_report_travels_between_processes_and_the_output_frees_its_tensors_at_once(
    v2: Any, device: FakeDevice, no_garbage_collection: None
) -> None:
    from vllm.v1.outputs import AsyncModelRunnerOutput

    runner = make_runner(v2, device)
    output = run_step(runner)
    assert isinstance(output, AsyncModelRunnerOutput)
    assert pickle.loads(pickle.dumps(output.get_output())).faser.drafted == output.get_output().faser.drafted
    gone = weakref.ref(output)
    del output
    assert gone() is None


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    import gc

    gc.disable()
    yield
    gc.enable()


def test_start_up_says_in_vllms_log_what_v2_cannot_do(v2: Any, device: FakeDevice, vllm_log: io.StringIO) -> None:
    make_runner(v2, device)
    assert "FASER on vLLM's V2 runner: V2 drafts the longest length of the batch" in vllm_log.getvalue()
