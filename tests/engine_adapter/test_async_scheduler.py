"""FASER's mixin on vLLM's real Scheduler and AsyncScheduler, driven like an engine drives them, without a model.

The device is simulated: it knows every request's true continuation, verifies whatever the scheduler sends against
it and drafts as many tokens as it was asked for. Any slip in the arithmetic of lengths, placeholders, roll-backs or
preemption changes some request's output, or trips an assertion of the device.
"""

import io
import itertools
import json
import random
import sys
import warnings
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.engine_adapter.protocol import ActionSet, Hello, Release, RequestEvent, StepRecord

pytest.importorskip("vllm", reason="needs an installed vLLM")

K_MAX = 4
MAX_MODEL_LEN = 160
BUDGET = 48
EXAMPLES = 30  # random engine lives per mode
WRONG = 1000  # draft tokens from here on are never right and never allowed by the grammar
MODES = ["sync-v1", "async-v1", "async-v2"]

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Wire:
    """Stands in for the link: what was sent, what waits to be received."""

    dropped = 0

    def __init__(self, *_: object) -> None:
        self.refused: Counter[str] = Counter()
        self.sent: list[Any] = []
        self.waiting: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def send_later(self, make: Callable[[], StepRecord], rest_s: float = 0.0) -> None:
        self.send(make())

    def receive(self) -> list[Any]:
        arrived, self.waiting = self.waiting, []
        return arrived

    def close(self) -> None:
        pass

    def records(self) -> list[StepRecord]:
        return [message for message in self.sent if isinstance(message, StepRecord)]

    def events(self) -> list[RequestEvent]:
        return [event for record in self.records() for event in record.events]


class Grammar:
    """Allows every true token and no wrong one; the scheduler's structured output manager."""

    def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
        if not request.use_structured_output:
            return tokens
        return tokens[: next((i for i, token in enumerate(tokens) if not 0 <= token < WRONG), len(tokens))]

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        return all(token < WRONG for token in tokens)

    def grammar_bitmask(self, requests: Any, ids: list[str], drafts: dict[str, list[int]]) -> None:
        return None

    def grammar_init(self, request: Any) -> None:
        pass


def true_token(request_id: str, position: int) -> int:
    return 10 + zlib.crc32(f"{request_id}:{position}".encode()) % 200


class Device:
    """Target and drafter of one engine: executes scheduler outputs in order, asserts that each makes sense."""

    def __init__(self, scheduler: Any, chance: random.Random) -> None:
        self.scheduler = scheduler
        self.chance = chance
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.drafts: dict[str, list[int]] = {}
        self.latched: dict[str, int] = {}
        self.last_batch: list[str] = []
        self.verified: Counter[int] = Counter()
        self.finds_nothing = False  # as a search without a match

    def _enter(self, output: Any) -> None:
        cached = output.scheduled_cached_reqs
        resumed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        fresh = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        fresh |= {request_id: resumed[request_id] for request_id in cached.resumed_req_ids}
        for request_id, computed in fresh.items():
            request = self.scheduler.requests.get(request_id)
            self.tokens[request_id] = list(request.all_token_ids) if request else [0] * 500
            self.computed[request_id] = computed
            self.drafts[request_id] = []
            # No padding of new requests with placeholder drafts.
            assert request_id not in output.scheduled_spec_decode_tokens

    def run(self, output: Any, grammar: Any = None) -> Any:
        """Verify, sample and draft one batch."""
        self._enter(output)
        allowed = dict(
            zip(grammar.structured_output_request_ids, grammar.num_acceptable_drafts, strict=True) if grammar else ()
        )
        rows = list(output.num_scheduled_tokens)
        self.chance.shuffle(rows)  # V2 sorts its batch, so the row is not the place in the schedule
        sampled = [self._row(output, request_id, allowed.get(request_id)) for request_id in rows]
        self.last_batch = rows
        return SimpleNamespace(
            req_ids=rows,
            req_id_to_index={request_id: row for row, request_id in enumerate(rows)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            prompt_token_id_logprobs_dict={},
            pooler_output=None,
            num_nans_in_logits=None,
            kv_connector_output=None,
            ec_connector_output=None,
            cudagraph_stats=None,
            sampling_masks=None,
            aux_output_connector_output=None,
        )

    def _row(self, output: Any, request_id: str, allowed: int | None) -> list[int]:
        tokens = self.tokens[request_id]
        placed = output.scheduled_spec_decode_tokens.get(request_id, [])
        own = output.num_scheduled_tokens[request_id] - len(placed)
        known = self.drafts[request_id]
        assert own >= 1
        assert len(placed) <= len(known), "more to verify than was drafted"
        assert self.computed[request_id] + own <= len(tokens)
        if self.computed[request_id] + own < len(tokens):
            assert not placed
            self.computed[request_id] += own
            self.drafts[request_id] = []
            return []
        self._check_latch(output, request_id, len(placed))
        if not isinstance(self.scheduler, async_scheduler()):
            assert placed == known[: len(placed)]
        accepted: list[int] = []
        limit = len(placed) if allowed is None else allowed
        for draft in known[:limit]:
            if draft != true_token(request_id, len(tokens) + len(accepted)):
                break
            accepted.append(draft)
        sampled = [*accepted, true_token(request_id, len(tokens) + len(accepted))]
        tokens += sampled
        self.computed[request_id] = len(tokens) - 1
        self._draft(output, request_id)
        return sampled

    def _check_latch(self, output: Any, request_id: str, verified: int) -> None:
        latched = self.latched.pop(request_id, 0) if self.drafts[request_id] else 0
        self.verified[verified] += 1
        request = self.scheduler.requests.get(request_id)
        is_free = request is not None and not request.use_structured_output
        if is_free and output.total_num_scheduled_tokens < BUDGET:
            assert verified == latched
        else:  # the token budget or the grammar may cut further
            assert verified <= latched

    def _draft(self, output: Any, request_id: str) -> None:
        tokens = self.tokens[request_id]
        right = [true_token(request_id, len(tokens) + i) for i in range(output.num_spec_tokens_to_schedule)]
        if self.finds_nothing:
            right = [-1] * len(right)
        self.drafts[request_id] = [t if t < 0 or self.chance.random() < 0.7 else WRONG + t for t in right]
        order = getattr(output, "faser", None)
        self.latched[request_id] = (
            order.lengths[request_id] if order is not None else output.num_spec_tokens_to_schedule
        )

    def take_drafts(self) -> Any:
        """Return the last batch's drafts on the host."""
        from vllm.v1.outputs import DraftTokenIds

        return DraftTokenIds(list(self.last_batch), [list(self.drafts[i]) for i in self.last_batch])


def async_scheduler() -> type:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return AsyncScheduler


class Engine:
    """vLLM's engine loop around a steered scheduler: `EngineCore.step`, or its batch queue of two when asynchronous."""

    def __init__(self, scheduler: Any, is_async: bool, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.scheduler = scheduler
        self.is_async = is_async
        self.device = Device(scheduler, self.chance)
        self.queue: deque[tuple[Any, Any]] = deque()
        self.emitted: dict[str, list[int]] = {}
        self.aborts: list[str] = []
        self.preemptions = 0
        self.steps = 0
        self.counted: Counter[str] = Counter()  # vLLM's own statistics

    @property
    def wire(self) -> Wire:
        wire: Wire = self.scheduler.steering.link
        return wire

    def add(self, request_id: str, prompt: int, max_tokens: int, **extra: Any) -> None:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.request import Request

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=extra.get("stop", []),
            structured_outputs=StructuredOutputsParams(choice=["a"]) if extra.get("structured") else None,
        )
        tokens = [true_token(extra.get("prefix", request_id), i) for i in range(prompt)]
        request = Request(request_id, tokens, params, None, block_hasher=self.scheduler.hasher)
        if request.structured_output_request is not None:
            request.structured_output_request._grammar = Grammar()
        self.emitted[request_id] = []
        self.scheduler.add_request(request)

    def steer(self, lengths: dict[str, int], default: int = 0, steps: int = 8, sequence: int | None = None) -> None:
        """Let an action set arrive before the next step."""
        steering = self.scheduler.steering
        handles = {entry.request_id: entry.handle for entry in steering.entries.values()}
        named = [(handles[i], k) for i, k in lengths.items() if i in handles]
        self.steps += 1
        self.wire.waiting.append(
            ActionSet(
                boot_id=steering.hello.boot_id,
                epoch=1,
                sequence=self.steps if sequence is None else sequence,
                valid_until_step=steering.step + steps,
                valid_until_s=1e18,
                default_length=default,
                handles=[handle for handle, _ in named],
                lengths=[length for _, length in named],
            )
        )

    def step(self) -> None:
        """Do what EngineCore does once."""
        if self.is_async:
            self._step_with_queue()
        elif self.scheduler.has_requests():
            output = self._schedule()
            result = self.device.run(output, self.scheduler.get_grammar_bitmask(output))
            self._update(output, result)
            if output.total_num_scheduled_tokens:
                self.scheduler.update_draft_token_ids(self.device.take_drafts())

    def _step_with_queue(self) -> None:
        deferred = None
        if self.scheduler.has_requests():
            output = self._schedule()
            if output.pending_structured_output_tokens:
                deferred = output
            else:
                result = self.device.run(output, self.scheduler.get_grammar_bitmask(output))
                self.queue.appendleft((output, result))
                if len(self.queue) < 2 and output.total_num_scheduled_tokens:
                    return
        elif not self.queue:
            return
        if self.queue:
            self._update(*self.queue.pop())
        if deferred is not None:
            self.scheduler.update_draft_token_ids_in_output(self.device.take_drafts(), deferred)
            result = self.device.run(deferred, self.scheduler.get_grammar_bitmask(deferred))
            self.queue.appendleft((deferred, result))

    def _schedule(self) -> Any:
        before = sum(request.num_preemptions for request in self.scheduler.requests.values())
        output = self.scheduler.schedule()
        self.preemptions += sum(r.num_preemptions for r in self.scheduler.requests.values()) - before
        if self.is_async:
            self._check_placeholders(output)
        return output

    def _check_placeholders(self, output: Any) -> None:
        assert self.scheduler._spec_token_placeholders == [-1] * output.num_spec_tokens_to_schedule
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            expected = 0 if request.is_prefill_chunk else output.faser.lengths[request_id]
            assert request.spec_token_ids == [-1] * expected
        for request in self.scheduler.running:
            assert request.num_output_placeholders >= 0
            assert request.num_computed_tokens <= request.num_tokens + request.num_output_placeholders

    def _update(self, output: Any, result: Any) -> None:
        from vllm.v1.request import RequestStatus

        if self.aborts:
            self.scheduler.finish_requests(self.aborts, RequestStatus.FINISHED_ABORTED)
            self.aborts = []
        for outputs in self.scheduler.update_from_output(output, result).values():
            for item in outputs.outputs:
                self.emitted[item.request_id] += item.new_token_ids
            if outputs.scheduler_stats is not None and (told := outputs.scheduler_stats.spec_decoding_stats):
                self.counted += Counter(verified=told.num_draft_tokens, accepted=told.num_accepted_tokens)
        assert self.scheduler.steering is not None, "FASER switched itself off"

    def finish(self, limit: int = 2000) -> None:
        """Run until nothing is left."""
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self.queue:
                return
            self.step()
        pytest.fail("requests are stuck")


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Real vLLM configurations of a one-layer model with itself as drafter; nothing is loaded."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own while vLLM is imported
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        import vllm.v1.core.sched.async_scheduler  # noqa: F401

        yield {mode: make_config(folder, mode.startswith("async")) for mode in MODES}


def make_config(folder: Path, is_async: bool) -> Any:
    from vllm import config

    model = config.ModelConfig(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN
    )
    made = config.VllmConfig(
        model_config=model,
        cache_config=config.CacheConfig(block_size=16, enable_prefix_caching=True),
        scheduler_config=config.SchedulerConfig(
            max_num_seqs=6, max_num_batched_tokens=BUDGET, max_model_len=MAX_MODEL_LEN, is_encoder_decoder=False
        ),
        speculative_config=config.SpeculativeConfig(
            method="draft_model",
            model=str(folder),
            num_speculative_tokens=K_MAX,
            target_model_config=model,
            target_parallel_config=config.ParallelConfig(),
        ),
        device_config=config.DeviceConfig("cpu"),
    )
    made.scheduler_config.async_scheduling = is_async  # vLLM switches it off on a CPU
    return made


def make_engine(
    configs: dict[str, Any], mode: str, blocks: int = 200, seed: int = 0, default: int = 0,
    endpoint: str = "inproc://faser", link: Any = Wire,
) -> Engine:  # fmt: skip
    """Return an engine whose scheduler came out of FASER's own factory."""
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from faser.engine_adapter import scheduler as module

    config = configs[mode]
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASER_ENDPOINT", endpoint)
        patch.setenv("FASER_DEFAULT_K", str(default))
        patch.setattr(module, "EngineLink", link)
        scheduler = module.FaserScheduler(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=Grammar(),
            block_size=16,
            log_stats=True,
        )
    scheduler.use_v2_model_runner = mode.endswith("v2")
    init_none_hash(sha256)
    scheduler.hasher = get_request_block_hasher(16, sha256)
    return Engine(scheduler, mode.startswith("async"), seed)


def expected(request_id: str, prompt: int, max_tokens: int, stop: list[int] | None = None) -> list[int]:
    tokens = [true_token(request_id, prompt + i) for i in range(max_tokens)]
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in (stop or [])), max_tokens)]


@pytest.mark.parametrize("mode", MODES)
def test_every_request_verifies_exactly_its_own_length(configs: dict[str, Any], mode: str) -> None:
    engine = make_engine(configs, mode)
    lengths = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4}
    for request_id in lengths:
        engine.add(request_id, prompt=5, max_tokens=60)
    for _ in range(12):
        engine.steer(lengths)
        engine.step()
    verified = {handle_of(engine, i): set[int]() for i in lengths}
    for record in engine.wire.records()[4:]:
        for row in record.rows:
            verified[row.handle].add(row.verified)
    assert verified == {handle_of(engine, i): {length} for i, length in lengths.items()}
    engine.finish()
    assert engine.emitted == {request_id: expected(request_id, 5, 60) for request_id in lengths}


@pytest.mark.parametrize("default", [0, 2])
def test_an_engine_that_cannot_be_steered_drafts_its_default_not_the_most(
    configs: dict[str, Any], tmp_path: Path, default: int
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    engine = make_engine(configs, MODES[0], default=default, endpoint=f"ipc://{folder}/engine.sock")
    assert engine.scheduler.steering is None
    engine.add("a", prompt=5, max_tokens=60)
    assert engine._schedule().num_spec_tokens_to_schedule == default


def refuse_to_connect(*_: object) -> None:
    raise zmq.ZMQError(22, "planted\nin two lines")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("endpoint", "link", "said"),
    [
        ("tcp://127.0.0.1:abc", Wire, "FASER_ENDPOINT='tcp://127.0.0.1:abc': expected tcp://HOST:PORT with a port"),
        ("tcp://127.0.0.1:9", refuse_to_connect, "ZMQError: planted in two lines"),
    ],
)
def test_an_endpoint_that_cannot_be_connected_to_is_one_line_and_vllm_goes_on(
    configs: dict[str, Any], vllm_log: io.StringIO, mode: str, endpoint: str, link: Any, said: str
) -> None:
    engine = make_engine(configs, mode, endpoint=endpoint, link=link)
    assert engine.scheduler.steering is None
    (line,) = [line for line in vllm_log.getvalue().splitlines() if "FASER" in line]
    assert f"FASER is off: {said}" in line
    engine.add("a", prompt=5, max_tokens=20)
    output = engine.scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 5}
    assert not hasattr(output, "faser")


@pytest.mark.parametrize("mode", MODES)
def test_with_a_vllm_that_is_not_known_the_factory_returns_vllms_own_scheduler(
    configs: dict[str, Any], vllm_log: io.StringIO, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    from faser.engine_adapter import scheduler as module

    def look(config: Any) -> None:
        raise AssertionError("an unknown vLLM's configuration was read")

    monkeypatch.setattr(module, "vllm_version", lambda: "0.99.0")
    monkeypatch.setattr(module, "refusal", look)
    scheduler = make_engine(configs, mode).scheduler
    assert type(scheduler).__name__ == ("AsyncScheduler" if mode.startswith("async") else "Scheduler")
    assert type(scheduler).__module__.startswith("vllm.")
    (line,) = [line for line in vllm_log.getvalue().splitlines() if "FASER" in line]
    assert "FASER is off: vLLM 0.99.0 is not known to FASER" in line


def test_a_vllm_that_keeps_its_schedulers_elsewhere_is_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from faser.engine_adapter import scheduler as module

    class Elsewhere:
        scheduler_cls: str | None = "faser.engine_adapter.scheduler.FaserScheduler"

        def get_scheduler_cls(self) -> type:
            assert self.scheduler_cls is None
            return SimpleNamespace

    for gone in ("scheduler", "async_scheduler"):  # an import of either fails
        monkeypatch.setitem(sys.modules, f"vllm.v1.core.sched.{gone}", None)
    monkeypatch.setattr(module, "vllm_version", lambda: "0.99.0")
    config: Any = SimpleNamespace(scheduler_config=Elsewhere())
    assert module.FaserScheduler(config, block_size=16) == SimpleNamespace(vllm_config=config, block_size=16)
    assert config.scheduler_config.scheduler_cls is not None


@pytest.mark.parametrize("said", ["0.99.0", None, RuntimeError("no metadata")])
def test_the_plugin_says_one_line_about_a_vllm_it_does_not_know_and_never_raises(
    configs: dict[str, Any], vllm_log: io.StringIO, monkeypatch: pytest.MonkeyPatch, said: Any
) -> None:
    from faser.engine_adapter.patches import versions
    from faser.engine_adapter.plugin import register

    def version() -> str | None:
        if isinstance(said, Exception):
            raise said
        found: str | None = said
        return found

    monkeypatch.setenv("FASER_ENDPOINT", "tcp://127.0.0.1:abc")
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.32.0")
    register()
    assert vllm_log.getvalue() == ""
    monkeypatch.setattr(versions, "vllm_version", version)
    register()
    assert len([line for line in vllm_log.getvalue().splitlines() if "FASER" in line]) == 1


def handle_of(engine: Engine, request_id: str) -> int:
    return next(e.handle for e in engine.wire.events() if e.kind == "arrival" and e.request_id == request_id)


@pytest.mark.parametrize("mode", MODES)
def test_without_a_lease_the_default_holds_and_nothing_is_drafted(configs: dict[str, Any], mode: str) -> None:
    engine = make_engine(configs, mode)
    engine.add("a", prompt=5, max_tokens=20)
    engine.finish()
    assert engine.device.verified == Counter({0: engine.device.verified[0]})
    assert engine.emitted["a"] == expected("a", 5, 20)


@pytest.mark.parametrize("mode", MODES)
def test_a_lease_that_ends_in_flight_falls_back_one_verification_later(configs: dict[str, Any], mode: str) -> None:
    engine = make_engine(configs, mode, default=1)
    engine.add("a", prompt=5, max_tokens=120)
    for _ in range(3):
        engine.step()
    engine.steer({"a": 3}, steps=4)
    for _ in range(12):
        engine.step()
    limits = [(row.draft_limit, row.verified) for record in engine.wire.records() for row in record.rows]
    leased = [record.lease_epoch for record in engine.wire.records()]
    assert sum(leased) == 4
    for (earlier, _), (_, verified) in itertools.pairwise(limits):
        assert verified == earlier  # what a step latched is what the next one verifies, lease or no lease
    assert {3, 1} == {limit for limit, _ in limits[3:]}


@pytest.mark.parametrize("mode", MODES)
def test_a_release_ends_the_lease_at_the_next_step(configs: dict[str, Any], mode: str) -> None:
    engine = make_engine(configs, mode)
    engine.add("a", prompt=5, max_tokens=80)
    engine.steer({"a": 3})
    engine.step()
    engine.wire.waiting.append(Release(engine.scheduler.steering.hello.boot_id, 1))
    for _ in range(4):
        engine.step()
    assert [record.lease_epoch for record in engine.wire.records()][:3] == [1, 0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_a_request_near_its_end_drafts_no_token_it_could_not_emit(configs: dict[str, Any], mode: str) -> None:
    engine = make_engine(configs, mode)
    for request_id, max_tokens in (("a", 1), ("b", 2), ("c", 3), ("d", 7)):
        engine.add(request_id, prompt=4, max_tokens=max_tokens)
    while engine.scheduler.has_requests():
        engine.steer({}, default=K_MAX)
        engine.step()
    engine.finish()
    assert engine.emitted == {i: expected(i, 4, n) for i, n in (("a", 1), ("b", 2), ("c", 3), ("d", 7))}
    limit = {handle_of(engine, i): n for i, n in (("a", 1), ("b", 2), ("c", 3), ("d", 7))}
    first = [row for record in engine.wire.records()[:1] for row in record.rows]
    assert [row.draft_limit <= max(0, limit[row.handle] - 2) for row in first] == [True] * len(first)


@pytest.mark.parametrize("mode", MODES)
def test_a_prefix_hit_of_a_new_request_is_not_padded_with_drafts(configs: dict[str, Any], mode: str) -> None:
    engine = make_engine(configs, mode)
    engine.add("a", prompt=33, max_tokens=40, prefix="same")
    engine.steer({}, default=2)
    for _ in range(4):
        engine.step()
    engine.add("b", prompt=33, max_tokens=10, prefix="same")  # one token is left to compute
    engine.finish()  # the device asserts that no new request brings placeholders
    assert engine.emitted["b"] == [true_token("b", 33 + i) for i in range(10)]


@pytest.mark.parametrize("mode", ["async-v1", "async-v2"])
def test_grammar_rejects_drafts_in_flight_and_the_output_stays_right(configs: dict[str, Any], mode: str) -> None:
    engine = make_engine(configs, mode)
    engine.add("json", prompt=5, max_tokens=50, structured=True)
    engine.add("free", prompt=5, max_tokens=50)
    while engine.scheduler.has_requests():
        engine.steer({"json": 4, "free": 2})
        engine.step()
    engine.finish()
    assert engine.emitted == {i: expected(i, 5, 50) for i in ("json", "free")}
    assert engine.device.verified[4] > 3


def test_rows_for_which_the_device_found_no_draft_count_as_vllm_counts_them(configs: dict[str, Any]) -> None:
    """V2's `ngram_gpu` puts -1 where nothing matches; the host has scheduled the rows already."""
    engine = make_engine(configs, "async-v2")
    engine.device.finds_nothing = True
    engine.add("a", prompt=5, max_tokens=12)
    while engine.scheduler.has_requests():
        engine.steer({}, default=3)
        engine.step()
    engine.finish()
    assert engine.emitted["a"] == expected("a", 5, 12)
    rows = [row for record in engine.wire.records() for row in record.rows]
    assert sum(row.verified for row in rows) == engine.counted["verified"] > 20
    assert sum(row.accepted for row in rows) == engine.counted["accepted"] == 0
    assert engine.wire.records()[-1].miscounted == 0


@pytest.mark.parametrize("mode", MODES)
def test_an_abort_between_schedule_and_output_leaves_the_others_alone(configs: dict[str, Any], mode: str) -> None:
    engine = make_engine(configs, mode)
    for request_id in "abc":
        engine.add(request_id, prompt=5, max_tokens=30)
    for _ in range(5):
        engine.steer({"a": 2, "b": 4, "c": 1})
        engine.step()
    engine.aborts = ["b"]
    engine.finish()
    kinds = Counter(event.kind for event in engine.wire.events())
    assert kinds == Counter(arrival=3, first_token=3, finish=2, abort=1)
    assert [engine.emitted[i] for i in "ac"] == [expected(i, 5, 30) for i in "ac"]
    assert engine.scheduler.steering.entries == {}


@pytest.mark.parametrize("mode", MODES)
def test_random_traffic_under_random_leases_gives_every_request_its_true_output(
    configs: dict[str, Any], mode: str
) -> None:
    @settings(max_examples=EXAMPLES, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1))
    def attempt(seed: int) -> None:
        engine = make_engine(configs, mode, blocks=random.Random(seed).choice([14, 18, 200]), seed=seed)
        drive_randomly(engine)

    attempt()


def drive_randomly(engine: Engine, steps: int = 60) -> None:
    chance = engine.chance
    wanted: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for step in range(steps):
        if chance.random() < 0.25 and len(wanted) < 12:
            request_id, prompt, most = f"r{step}", chance.randint(1, 70), chance.randint(1, 40)
            stop = [true_token(request_id, prompt + chance.randrange(40))] if chance.random() < 0.3 else []
            engine.add(request_id, prompt, most, stop=stop, structured=chance.random() < 0.3)
            wanted[request_id] = expected(request_id, prompt, most, stop)
        if chance.random() < 0.6:
            lengths = {request_id: chance.randint(0, K_MAX) for request_id in wanted}
            engine.steer(lengths, default=chance.randint(0, K_MAX), steps=chance.randint(0, 4))
        if wanted and chance.random() < 0.05:
            victim = chance.choice(list(wanted))
            engine.aborts.append(victim)
            aborted.add(victim)
        engine.step()
    engine.finish()
    for request_id, tokens in wanted.items():
        most = len(engine.emitted[request_id]) if request_id in aborted else len(tokens)
        assert engine.emitted[request_id] == tokens[:most], request_id
    check_records(engine, set(wanted), aborted)


def check_records(engine: Engine, requests: set[str], aborted: set[str]) -> None:
    records, events = engine.wire.records(), engine.wire.events()
    assert [record.counter for record in records] == list(range(1, len(records) + 1))
    assert isinstance(engine.wire.sent[0], Hello)
    handles = {event.handle: event.request_id for event in events if event.kind == "arrival"}
    assert set(handles.values()) == requests
    left = Counter(event.handle for event in events if event.kind in ("finish", "abort"))
    assert left == dict.fromkeys(handles, 1)  # each request leaves once
    emitted: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for record in records:
        for row in record.rows:
            emitted[handles[row.handle]] += row.emitted
            counted += Counter(verified=row.verified, accepted=row.accepted)
            assert row.accepted <= row.verified <= K_MAX
            assert row.draft_limit <= K_MAX
    assert {i: emitted[i] for i in requests} == {i: len(engine.emitted[i]) for i in requests}
    assert counted == engine.counted
    assert records[-1].miscounted == 0
    told = {handles[event.handle]: event.tokens for event in events if event.kind in ("finish", "abort")}
    assert told == {i: len(engine.emitted[i]) for i in requests}
    assert sum(event.kind == "preempt" for event in events) == engine.preemptions
