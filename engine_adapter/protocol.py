"""The wire vocabulary: every message between engine and sidecar, with units and bounds.

Both ends import this file; docs/reference/protocol.md is generated from it. A frame is two header bytes (magic,
version) and one msgpack array-like struct whose first element is the message's tag. Never pickle: msgspec only builds
the types below.

Request handles, not request ids, travel in every step: an engine counts its requests from 1 within one boot,
and the arrival event (or the roster in `Hello`) says once which id a handle stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

MAGIC: Final = 0xFA
VERSION: Final = 2
HEADER: Final = bytes((MAGIC, VERSION))
MAX_FRAME_BYTES: Final = 1 << 20
MAX_REQUESTS: Final = 4096
MAX_DRAFT_LENGTH: Final = 64
MOST_REST_STEPS: Final = 3
RAGGED: Final = "ragged"
LONGEST: Final = "longest"
LARGEST_PRIORITY: Final = 1 << 62
LARGEST_NUMBER: Final = 1e18  # of seconds, and of what a fit gives
TTFT_MS: Final = (1.0, 600_000.0)  # least and most that an objective for the first token may be
TPOT_MS: Final = (0.1, 60_000.0)  # ... for each further one

Mode = Literal["active", "advisory", "canary", "off"]
Rounds = Literal["ragged", "longest"]
EventKind = Literal["arrival", "first_token", "finish", "abort", "preempt"]

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Handle = Annotated[int, Meta(ge=1, le=1 << 62)]
DraftLength = Annotated[int, Meta(ge=0, le=MAX_DRAFT_LENGTH)]
Text = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(max_length=128)]
Handles = Annotated[list[Handle], Meta(max_length=MAX_REQUESTS)]
SomeHandles = Annotated[tuple[Handle, ...], Meta(max_length=MAX_REQUESTS)]
DraftLengths = Annotated[list[DraftLength], Meta(max_length=MAX_REQUESTS)]
# Bounds keep out what is not finite, while decoding.
Number = Annotated[float, Meta(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Cost = Annotated[float, Meta(gt=0.0, le=1e6)]  # seconds
Weight = Annotated[float, Meta(ge=1e-3, le=1e3)]  # of a request's tokens
SomeWeights = Annotated[tuple[Weight, ...], Meta(max_length=MAX_REQUESTS)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Priority = Annotated[int, Meta(ge=-LARGEST_PRIORITY, le=LARGEST_PRIORITY)]
Ttft = Annotated[float, Meta(ge=TTFT_MS[0], le=TTFT_MS[1])]
Tpot = Annotated[float, Meta(ge=TPOT_MS[0], le=TPOT_MS[1])]
Confidences = Annotated[tuple[Share, ...], Meta(max_length=MAX_DRAFT_LENGTH)]
PerPosition = Annotated[list[Number], Meta(min_length=1, max_length=MAX_DRAFT_LENGTH)]
Split = Annotated[int, Meta(ge=0, le=64)]
StageBounds = Annotated[tuple[Count, ...], Meta(max_length=63)]  # the first layer behind each rank but the last
RestSteps = Annotated[int, Meta(ge=0, le=MOST_REST_STEPS)]
TableRow = tuple[Count, Count, DraftLength]
GraphLengths = Annotated[list[Count], Meta(max_length=64)]
Frontier = Annotated[int, Meta(ge=0, le=MAX_DRAFT_LENGTH)]


class ProtocolError(ValueError):
    """A frame that is dropped and counted; `reason` is one of REASONS and is the counter's label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


REASONS: Final = ("oversized", "wrong_version", "malformed", "out_of_bounds")


class RequestEvent(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Something that happened to one request since the last record.

    `tokens` is the prompt length at arrival, otherwise the tokens emitted so far; `time_s` is the engine's monotonic
    clock.
    """

    kind: EventKind
    handle: Handle
    time_s: Number
    tokens: Count
    request_id: Text = ""  # with an arrival only
    priority: Priority = 0
    most: DraftLength = MAX_DRAFT_LENGTH  # longest draft that its client allows; with an arrival only
    may_be_stop: bool = False  # an abort that a stop string may have caused: vLLM aborts for both
    ttft_ms: Ttft | None = None  # 1..600000, until its first token, as its client wants it; with an arrival only
    tpot_ms: Tpot | None = None  # 0.1..60000, the mean per further token; with an arrival only


class RequestRow(msgspec.Struct, array_like=True, gc=False):
    """What one step did for one request. Tokens unless said otherwise."""

    handle: Handle
    scheduled: Count  # rows given to the target, drafts included
    draft_limit: DraftLength  # draft length in force when this step drafted
    drafted: DraftLength  # draft tokens handed over for the next step
    verified: DraftLength  # draft tokens verified in this step
    pruned: DraftLength  # of `verified`, how many left the forward pass early
    accepted: DraftLength
    emitted: Count
    context: Count  # computed tokens of the request after this step
    is_prefill: bool
    confidences: Confidences = ()  # drafter's probability of its top token, for each verified one and those dropped


class StepRecord(msgspec.Struct, array_like=True, tag="step", gc=False):
    """What one engine step did. Times in seconds, on the engine's monotonic clock."""

    boot_id: Name
    counter: Count  # of records, not steps; a hole is a lost record
    step: Count
    time_s: Number  # end of the step
    step_s: Number  # schedule() to the end of update_from_output()
    schedule_s: Number
    verify_s: Number  # the target's forward pass
    sample_s: Number
    draft_s: Number
    overlap_s: Number  # time in which drafting and verification both ran
    adapter_s: Number  # CPU time of this plugin in the previous step
    running: Count
    waiting: Count
    prefill_tokens: Count
    decode_tokens: Count  # one per decoding request
    draft_tokens: Count  # rows on top of decode_tokens
    kv_usage: Number  # 0..1
    split: Split | None
    frontier: Frontier | None
    lease_epoch: Count  # 0: the engine's default was in force
    lease_sequence: Count
    dropped: Count  # records this engine could not send since boot
    rejected: Count  # messages from a controller this engine refused since boot
    events: Annotated[list[RequestEvent], Meta(max_length=MAX_REQUESTS)]
    rows: Annotated[Sequence[RequestRow], Meta(max_length=MAX_REQUESTS)]
    caught_up: Count = 0  # tokens that the drafter had skipped and read in `draft_s`
    draft_rounds: Count | None = None  # drafter passes that drew a token; none: unknown
    drawn_tokens: Count | None = None  # tokens drawn in them, dropped ones included
    prune_layer: Count | None = None  # the layer behind which exit heads judged the drafts
    prune_s: Number = 0.0  # part of `verify_s` that pruning took
    saved_rows: Number = 0.0  # rows that left early, each as the share of layers saved
    wrongly_pruned: Count = 0  # drafts cut at a token that was then accepted
    frontier_hits: Count = 0  # requests whose next draft had been drafted ahead
    frontier_misses: Count = 0  # requests whose frontier was wrong or late
    sat_out: Count = 0  # requests that could not draft: a sequence is longer than the drafter's context
    miscounted: Count = 0  # tokens since boot by which `verified` and `accepted` differ from vLLM's
    copied: SomeHandles = ()  # requests whose `drafted` tokens, and a step later
    verified_copies: SomeHandles = ()  # ... whose `verified` ones and confidences are a match's, not the drafter's
    stage_bounds: StageBounds | None = None  # of the next step's pipeline; none: its stages cannot move
    stage_moves: Count = 0  # completed since boot
    is_moving: bool = False  # a move is under way
    rested: Count = 0  # requests left out of this step for the sake of others


class Stages(msgspec.Struct, array_like=True, frozen=True):
    """A pipeline whose stages can move: its layers, and how they are dealt to its ranks now.

    Rank r runs the layers from its lower to its upper bound; a range may be empty.
    """

    layers: Count
    bounds: StageBounds


class Hello(msgspec.Struct, array_like=True, tag="hello", frozen=True):
    """Who an engine is and what it can do; sent at start and whenever a controller asks.

    `graph_lengths` holds each length for which vLLM replays a full CUDA graph at some batch size where all requests
    verify that many drafts. It does not say whether batches of mixed lengths have one.
    """

    boot_id: Name
    pid: Count
    host: Name
    adapter_version: Name
    vllm_version: Name
    model: Text
    device: Name  # cpu | cuda
    runner: Literal["v1", "v2"]
    is_async: bool
    method: Name  # vLLM's name of the drafting method
    drafter: Text
    k_max: DraftLength
    default_length: DraftLength
    default_table: Annotated[list[TableRow], Meta(max_length=64)]  # [first, last, length] by batch size
    max_requests: Count
    max_batched_tokens: Count
    kv_tokens: Count  # KV-cache capacity
    graph_sizes: Annotated[list[Count], Meta(max_length=512)]  # captured token counts; empty: eager, any size
    splits: Annotated[list[Name], Meta(max_length=64)]  # partitions that are ready; index 0 is unsplit
    exit_layers: Annotated[list[Count], Meta(max_length=512)]  # layers with an exit head; empty: no pruning
    tensor_parallel: Count
    pipeline_parallel: Count
    data_parallel: Count
    data_parallel_rank: Count
    lease_steps: Count  # the longest lease this engine grants
    lease_ms: Count
    roster: Annotated[list[RequestEvent], Meta(max_length=MAX_REQUESTS)]  # live requests, as arrivals
    graph_lengths: GraphLengths = []  # empty: all lengths cost alike
    released_prune: Prune | None = None  # what the exit heads were released for
    frontier: Frontier = 0  # most tokens drafted ahead; 0: none
    epoch: Count = 0  # the highest that it obeyed: it refuses lower ones; 0: none
    is_adaptive: bool = False  # vLLM's adaptive verification: of what is drafted, it verifies what pays
    copy_max: DraftLength = 0  # longest draft copied from a request's own text; 0: none is
    rounds: Rounds = RAGGED  # ragged: a request's own length saves drafting; longest: all draft the batch's longest
    stages: Stages | None = None  # none: one rank, or stages that cannot move
    rest_steps: RestSteps = 0  # most steps in a row that a request which decodes can be left out of; 0: none

    @property
    def longest(self) -> int:
        """Tokens of the longest draft, whoever makes it."""
        return max(self.k_max, self.copy_max)


class Goodbye(msgspec.Struct, array_like=True, tag="goodbye", frozen=True):
    """The engine shuts down."""

    boot_id: Name


class Prune(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Leave the forward pass after `layer` where predicted acceptance is below `threshold` (0..1)."""

    layer: Annotated[int, Meta(ge=0, le=1024)]
    threshold: Share


class StopRule(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """When a request's draft ends before its length. Entry j-1 is for draft position j; the last one holds beyond.

    c_j is the drafter's probability of its top token at position j, p_j = sigmoid(intercept + slope * logit(c_j)),
    S_j = p_1 * ... * p_j. Token j is verified only if S_j >= keep. Token j+1 is drafted only if token j is verified
    and S_j >= go_on. `logit` (engine_adapter/steering/stop_rule.py) limits c_j.
    """

    slopes: PerPosition
    intercepts: PerPosition
    keep: PerPosition
    go_on: PerPosition

    def numbers(self) -> list[float]:
        """Return every number of the rule."""
        return [*self.slopes, *self.intercepts, *self.keep, *self.go_on]


class MatchRule(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """When a request's next draft is copied from its own text, where the same words were followed by something before.

    The engine gives each copied token a chance c_j, with which a match promises S_j as under a `StopRule`. Its tokens
    are verified while S_j >= keep; it takes the place of a draft of the drafter's if the sum of S_j - keep over them
    is more than `worth`. The drafter runs only if at least `fewest` requests are left to it. For a request whose tokens
    are worth more or less than the others', keep is divided by its weight. A step with drafts takes longer than one
    without before their rows are counted: where none of the drafter's is asked for, all copies are left unless these
    sums, by weight, are together more than `least`.
    """

    slopes: PerPosition
    intercepts: PerPosition
    keep: PerPosition
    most: DraftLength
    worth: Number = 0.0  # tokens
    fewest: Count = 1
    handles: SomeHandles = ()  # requests with a weight
    weights: SomeWeights = ()  # of these, what their tokens are worth; 1 for whoever is not named
    least: Number = 0.0  # tokens

    def numbers(self) -> list[float]:
        """Return every number of the rule that may be anything."""
        return [*self.slopes, *self.intercepts, *self.keep, self.worth, self.least]


class Rest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Who is left out of steps, so that these are shorter for the others: all that rest decode in the same steps.

    Nobody rests in the middle of a prompt, nor while nobody else is in the batch.
    """

    handles: SomeHandles
    steps: RestSteps  # that they sit out for each one in which they decode


class Admission(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What an engine with adaptive verification shall reckon with when it chooses how many drafts to verify.

    It maximises (sum of weights of requests + weighted survival of the verified drafts) / seconds.
    """

    rows: Annotated[list[Count], Meta(min_length=1, max_length=64)]  # tokens in the target's batch, rising
    seconds: Annotated[list[Cost], Meta(min_length=1, max_length=64)]  # of a whole step with so many, drafting included
    weights: Annotated[list[Weight], Meta(max_length=MAX_REQUESTS)] = []  # of `handles`; empty: a token is a token


class ActionSet(msgspec.Struct, array_like=True, tag="act", gc=False):
    """What a controller asks for from the next step on, until `valid_until_step` or `valid_until_s` is past.

    Both limits are on the engine's own counters, so a message that waited in a queue is as old as it really is. None
    means "no opinion".
    """

    boot_id: Name
    epoch: Annotated[int, Meta(ge=1, le=1 << 62)]
    sequence: Count
    valid_until_step: Count
    valid_until_s: Number
    default_length: DraftLength  # for requests that are not named
    handles: Handles
    lengths: DraftLengths
    price: Number | None = None  # seconds one more row may cost; for the record only
    split: Split | None = None
    frontier: Frontier | None = None
    prune: Prune | None = None
    mode: Mode = "active"
    stop: StopRule | None = None  # ends drafts on confidence, within `lengths`
    admission: Admission | None = None  # None: vLLM's own costs, every token alike
    match: MatchRule | None = None  # None: nothing is copied
    stage_bounds: StageBounds | None = None  # where to cut the pipeline; the stages stay when a lease ends
    rest: Rest | None = None  # None: nobody rests


class HelloRequest(msgspec.Struct, array_like=True, tag="who", frozen=True):
    """The controller asks an engine that it does not know for its `Hello`."""

    epoch: Count


class Release(msgspec.Struct, array_like=True, tag="release", frozen=True):
    """The controller gives its lease back: the engine's default holds from the next step on."""

    boot_id: Name
    epoch: Count


FromEngine = Hello | StepRecord | Goodbye
FromController = ActionSet | HelloRequest | Release

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_controller_decoder: msgspec.msgpack.Decoder[FromController] = msgspec.msgpack.Decoder(FromController)


def encode(message: FromEngine | FromController) -> bytearray:
    """Return the frame of a message."""
    frame = bytearray(HEADER)
    _encoder.encode_into(message, frame, len(HEADER))
    return frame


def decode_from_engine(frame: bytes | memoryview) -> FromEngine:
    """Return the message an engine sent; raise ProtocolError for anything else."""
    return decode_with(_engine_decoder, frame)


def decode_from_controller(frame: bytes | memoryview) -> FromController:
    """Return the message a controller sent; raise ProtocolError for anything else."""
    message = decode_with(_controller_decoder, frame)
    if isinstance(message, ActionSet) and len(message.handles) != len(message.lengths):
        raise ProtocolError("out_of_bounds", f"{len(message.handles)} handles, {len(message.lengths)} lengths")
    return message


def decode_with(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview) -> T:
    """Return what a decoder makes of a frame's content; raise ProtocolError for what is no frame, or not its type."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError("oversized", f"{len(frame)} bytes, at most {MAX_FRAME_BYTES}")
    if len(frame) < len(HEADER) or frame[0] != MAGIC:
        raise ProtocolError("malformed", f"{len(frame)} bytes without the magic byte {MAGIC:#x}")
    if frame[1] != VERSION:
        raise ProtocolError("wrong_version", f"version {frame[1]}, this side speaks {VERSION}")
    try:
        return decoder.decode(memoryview(frame)[len(HEADER) :])
    except msgspec.ValidationError as error:
        raise ProtocolError("out_of_bounds", str(error)) from None
    except (msgspec.DecodeError, MemoryError, OverflowError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError("malformed", str(error)) from None
