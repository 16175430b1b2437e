"""Another tool's forward-pass metrics (FPM), as NVIDIA Dynamo writes them for vLLM, SGLang and TensorRT-LLM: one record
per forward pass.

Called by the replay. Reads JSON lines, plain or gzip, from a file or from stdin: either Dynamo's trace envelope
(`dynamo.fpm.trace.v1`) around each record or the bare record, schema version 1. Never guesses: what cannot be read is
an error that names file and row.
"""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec
from msgspec import Meta

from ..errors import StoreError

VERSION: Final = 1  # of the records; others are counted and left out, as the schema asks of its readers
SCHEMA: Final = "dynamo.fpm.trace.v1"
MAX_ROW_BYTES: Final = 1 << 20
STDIN: Final = Path("-")

Count = Annotated[int, Meta(ge=0, le=1 << 48)]
Measure = Annotated[float, Meta(ge=0.0, le=1e18)]
Requests = Annotated[int, Meta(ge=0, le=1 << 16)]


class ScheduledRequests(msgspec.Struct, frozen=True):
    """What a pass worked on: sums over requests, and population variances."""

    num_prefill_requests: Requests = 0
    sum_prefill_tokens: Count = 0  # computed in this pass
    var_prefill_length: Measure = 0.0  # of whole prompts
    sum_prefill_kv_tokens: Count = 0  # read, not computed
    num_decode_requests: Requests = 0
    sum_decode_kv_tokens: Count = 0
    var_decode_kv_tokens: Measure = 0.0


class QueuedRequests(msgspec.Struct, frozen=True):
    """What waited meanwhile."""

    num_prefill_requests: Requests = 0
    sum_prefill_tokens: Count = 0
    var_prefill_length: Measure = 0.0
    num_decode_requests: Requests = 0  # preempted
    sum_decode_kv_tokens: Count = 0
    var_decode_kv_tokens: Measure = 0.0


class ForwardPass(msgspec.Struct, frozen=True):
    """One pass of one rank of one worker; all zero: a heartbeat of an idle engine."""

    version: int
    worker_id: str
    counter_id: Count  # counts up per worker and rank; 0: not counted
    wall_time: Annotated[float, Meta(ge=0.0, le=1e6)]  # seconds from schedule() to update_from_output()
    scheduled_requests: ScheduledRequests
    dp_rank: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    queued_requests: QueuedRequests = QueuedRequests()

    def is_idle(self) -> bool:
        """Return whether nothing was worked on."""
        return not (self.scheduled_requests.num_prefill_requests or self.scheduled_requests.num_decode_requests)


class _Event(msgspec.Struct, frozen=True):
    schema: str
    fpm: msgspec.Raw
    capture_mode: str = "full"
    observed_at_unix_ms: Measure | None = None


class _Envelope(msgspec.Struct, frozen=True):
    event: _Event


class _Version(msgspec.Struct, frozen=True):
    version: int


@dataclass(frozen=True, slots=True)
class ForwardPasses:
    """A whole input; `observed_s` has each pass's wall clock, None where the rows do not say."""

    passes: list[ForwardPass]
    observed_s: list[float | None]
    other_versions: int
    is_sampled: bool


def is_forward_pass_metrics(path: Path) -> bool:
    """Return whether a replay's input is FPM by its first bytes: gzip or JSON, which telemetry never is."""
    if path == STDIN:
        return True
    try:
        with path.open("rb") as stream:
            start = stream.read(64).lstrip()
    except OSError:  # whoever opens it next says why
        return False
    return start.startswith((b"{", b"\x1f\x8b"))


def read_forward_passes(path: Path) -> ForwardPasses:
    """Read every row; raise StoreError that names file and row."""
    passes: list[ForwardPass] = []
    observed_s: list[float | None] = []
    others, is_sampled, row = 0, False, 0
    try:
        with _opened(path) as stream:
            for text in _rows(stream):
                row += 1
                if not text.strip():
                    continue
                if len(text) > MAX_ROW_BYTES:
                    raise ValueError(f"longer than {MAX_ROW_BYTES} bytes")
                event = _event(text)
                is_sampled |= event.capture_mode == "sampled"
                if msgspec.json.decode(event.fpm, type=_Version).version != VERSION:
                    others += 1
                    continue
                passes.append(msgspec.json.decode(event.fpm, type=ForwardPass))
                observed_s.append(None if event.observed_at_unix_ms is None else event.observed_at_unix_ms / 1e3)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _unreadable(path, row + 1, f"the gzip stream is damaged ({error})") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise _unreadable(path, row, str(error)) from None
    except OSError as error:
        raise StoreError(f"{_name(path)} cannot be read: {error.strerror or error}", "a readable file") from None
    if not passes:
        seen = f"{others} rows of other versions" if others else "no row"
        raise StoreError(f"{_name(path)} holds {seen}", f"forward-pass metrics of version {VERSION}")
    return ForwardPasses(passes, observed_s, others, is_sampled)


def _opened(path: Path) -> Any:
    if path == STDIN:
        return nullcontext(sys.stdin.buffer)
    with path.open("rb") as stream:
        is_packed = stream.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_packed else path.open("rb")


def _rows(stream: IO[bytes]) -> Iterator[bytes]:
    while row := stream.readline(MAX_ROW_BYTES + 1):
        yield row


def _event(row: bytes) -> _Event:
    """Return a row's record, with what stands around it."""
    if "event" not in msgspec.json.decode(row, type=dict[str, msgspec.Raw]):
        return _Event(SCHEMA, msgspec.Raw(row))
    event = msgspec.json.decode(row, type=_Envelope).event
    if event.schema != SCHEMA:
        raise ValueError(f"schema {event.schema!r}")
    return event


def _name(path: Path) -> str:
    return "stdin" if path == STDIN else str(path)


def _unreadable(path: Path, row: int, reason: str) -> StoreError:
    return StoreError(
        f"{_name(path)}, row {row}: {reason}", f"forward-pass metrics of version {VERSION}, bare or as {SCHEMA}",
        "see docs/reference/telemetry.md",
    )  # fmt: skip
