"""`faser status` and the way every reader asks a running sidecar how it is.

`ask` is used by top, the demo and tests. Asking never disturbs the loop: one small frame, one JSON reply.
"""

from __future__ import annotations

import getpass
import os
from pathlib import Path
from typing import Final

import msgspec
import zmq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...engine_adapter.protocol import Mode
from ..config import LinkConfig
from ..decision.modes import EVERY
from ..errors import NotRunningError, UsageError
from ..snapshot import (
    QUESTION,
    AttainmentStatus,
    AuditStatus,
    EngineStatus,
    Snapshot,
    SourceStatus,
    SteeringStatus,
    StoreStatus,
    decode_snapshot,
    encode_snapshot,
)
from ..telemetry.footprint import in_words, remedy
from .endpoint import IPC, status_address
from .status_orders import MAX_BY, Refusal, Switch, encode_order

TIMEOUT_S: Final = 2.0


def ask(link: LinkConfig, timeout_s: float = TIMEOUT_S) -> Snapshot:
    """Return the running sidecar's snapshot; raise NotRunningError if none answers in time."""
    return decode_snapshot(exchange(link, QUESTION, timeout_s))


def order(link: LinkConfig, switch: Switch, timeout_s: float = TIMEOUT_S) -> Snapshot:
    """Have the running sidecar switch a mode; raise UsageError with its reason if it does not."""
    reply = exchange(link, encode_order(switch), timeout_s)
    try:
        raise UsageError(msgspec.json.decode(reply, type=Refusal).error)
    except msgspec.MsgspecError:
        return decode_snapshot(reply)


def exchange(link: LinkConfig, question: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
    """Return the running sidecar's reply to one frame; raise NotRunningError if none comes in time."""
    address = status_address(link.endpoint, link.status_endpoint)
    if address.startswith(IPC) and not Path(address.removeprefix(IPC)).exists():
        raise _not_running(address, "no socket there")
    try:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    except zmq.ZMQError as error:  # no file descriptor is left
        raise _not_running(address, str(error)) from None
    try:
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            socket.send(question, zmq.NOBLOCK)
            if not socket.poll(int(timeout_s * 1e3)):
                hint = "; if one runs, it hangs or is stopped: continue or end it"
                raise _not_running(address, f"no answer within {timeout_s:g} s", hint)
            return socket.recv()
    except zmq.ZMQError as error:
        raise _not_running(address, str(error)) from None
    finally:
        context.term()


def _not_running(address: str, seen: str, hint: str = "") -> NotRunningError:
    return NotRunningError(f"no sidecar runs at {address} ({seen})", remedy=f"start one with: faser sidecar{hint}")


def run_status(link: LinkConfig, is_json: bool) -> int:
    """Print the snapshot once."""
    snapshot = ask(link)
    console = Console(soft_wrap=True)
    if is_json:
        console.out(encode_snapshot(snapshot).decode(), highlight=False)
    else:
        console.print(Text(overview(snapshot)))
        for engine in snapshot.engines:
            console.print(engine_table(engine))
    return 0


def run_mode(link: LinkConfig, mode: Mode | None, engine: str, is_forgotten: bool) -> int:
    """Switch a mode, or forget a switch, and print what holds now; with neither only print."""
    if mode is None and not is_forgotten:
        snapshot = ask(link)
    else:
        snapshot = order(link, Switch(engine, mode, f"faser mode, {_user()}"[:MAX_BY]))
    console = Console(soft_wrap=True, highlight=False)
    for target, switched in snapshot.modes.items():
        console.print(Text(f"{switched}: switched for {'every engine' if target == EVERY else target}"))
    console.print(Text(f"{snapshot.default_mode}: default (mode.default)"))
    for status in snapshot.engines:
        console.print(Text(f"engine {status.boot_id} ({status.steering.name}): {_mode_line(status.steering)}"))
    return 0


def _user() -> str:
    """Return who orders; in a container the user may have a number only."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _mode_line(steering: SteeringStatus) -> str:
    if steering.mode == "off" or steering.stance == "steer":
        return steering.mode
    return f"{steering.mode}, {steering.stance}: {steering.reason}"


def overview(snapshot: Snapshot) -> str:
    """Return the sidecar's own lines: policy, link, telemetry."""
    link, store = snapshot.link, snapshot.store
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(link.dropped.items())) or "none"
    if not store.path:
        telemetry = "off"
    elif store.error:
        telemetry = f"STOPPED: {store.error} ({store.path})"
    else:
        telemetry = (
            f"{store.path}: {store.written} written, {store.queued} waiting, {store.dropped} dropped; "
            f"{in_words(store.file_bytes)}, log {in_words(store.log_bytes)}{_pin(store)}"
        )
    return (
        f"sidecar {snapshot.faser_version}, pid {snapshot.pid}, up {snapshot.uptime_s:.0f} s, "
        f"policy {snapshot.policy}\n"
        f"link {link.endpoint}: {link.received} in, {link.sent} out, dropped {dropped}, "
        f"{link.disconnects} disconnects\n"
        f"telemetry {telemetry}\n"
        f"{_audit_line(snapshot.audit)}"
        f"engines {len(snapshot.engines) or 'none yet: start one with faser serve MODEL'}"
    )


def _pin(store: StoreStatus) -> str:
    """Return what is wrong with the log, nothing where nothing is."""
    if not store.pinned_s:
        return ""
    return f" PINNED by a reader for {store.pinned_s:.0f} s: {remedy(Path(store.path))}"


def _audit_line(audit: AuditStatus) -> str:
    """Return a line about the file of decisions, nothing where none is kept."""
    if not audit.path:
        return ""
    failed = f"; FAILING: {audit.error}" if audit.error else ""
    counts = f"{audit.written} written, {audit.dropped} dropped, {audit.failures} failed writes"
    return f"audit {audit.path}: {counts}{failed}\n"


def engine_table(engine: EngineStatus) -> Table:
    """Return one engine's figures as two columns."""
    table = Table(title=Text(f"{engine.boot_id}: {engine.model}"), title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, text in engine_lines(engine):
        table.add_row(name, Text(text))  # names and paths are not markup
    return table


def _goodput_line(engine: EngineStatus) -> str:
    """Return the emitted tokens per second, rejected drafts left out, beside what no speculation would give."""
    ratio = engine.steering.envelope_ratio
    beside = "" if ratio is None else f", {ratio:.2f} times those of no speculation"
    return f"{engine.tokens_per_s:.1f} tokens/s{beside}; {engine.steps_per_s:.1f} steps/s of {engine.step_ms:.1f} ms"


def engine_lines(engine: EngineStatus) -> list[tuple[str, str]]:
    """Return one engine's figures as (name, text)."""
    age = "never heard" if engine.last_record_age_s is None else f"last record {engine.last_record_age_s:.1f} s ago"
    lease = "engine's default" if engine.lease_age_s is None else f"held, {engine.lease_age_s * 1e3:.0f} ms old"
    positions = " ".join("-" if share is None else f"{share:.2f}" for share in engine.acceptance_by_position)
    rate = "-" if engine.acceptance_rate is None else f"{engine.acceptance_rate:.2f}"
    return [
        (
            "engine",
            f"vLLM {engine.vllm_version} on {engine.device}, {engine.method} {engine.drafter}, pid {engine.pid}",
        ),
        ("presence", f"{engine.presence}, {age}"),
        ("load", f"{engine.running} running, {engine.waiting} waiting, KV cache {engine.kv_usage:.0%}"),
        ("goodput", _goodput_line(engine)),
        ("lengths", f"mean {engine.mean_draft_length:.2f} of {engine.k_max}"),
        ("acceptance", f"{rate}, by position {positions}"),
        *((name, source_line(source)) for name, source in engine.sources.items()),
        *_objective_lines(engine),
        *([("split", f"{engine.split}, drafter to target")] if engine.split else []),
        *([("stages", engine.stages.told())] if engine.stages else []),
        ("lease", f"{lease}, {engine.lease_share:.1%} of the last steps"),
        (
            "link",
            f"{engine.records} records, {engine.lost_records} lost in {engine.gaps} gaps, {engine.late_records} late, "
            f"engine dropped {engine.engine_dropped}, rejected {engine.engine_rejected}",
        ),
        (
            "decisions",
            f"{engine.decisions}, {engine.decision_us_p50:.0f} us p50, {engine.decision_us_p99:.0f} us p99, "
            f"{engine.sends_dropped} not sent, {engine.failures} failed, {engine.clamped} clamped, "
            f"{engine.handed_over} handed to price; adapter {engine.adapter_us:.0f} us/step",
        ),
        ("mode", _mode_line(engine.steering)),
        ("reason", engine.reason or "-"),
        *_miscount_lines(engine),
    ]


def source_line(source: SourceStatus) -> str:
    """Return what became of one source's drafts."""
    rate, waste = ("-" if share is None else f"{share:.2f}" for share in (source.acceptance_rate, source.waste))
    accepted = f"{rate} of {source.verified} tokens accepted, {waste} wasted per token"
    return f"{accepted}; for {source.share:.0%} of the requests"


def _objective_lines(engine: EngineStatus) -> list[tuple[str, str]]:
    """Return a line about who was in time, nothing where nobody has objectives."""
    if not engine.attainment:
        return []
    return [("in time", "; ".join(f"{name} {in_time_of(counts)}" for name, counts in engine.attainment.items()))]


def in_time_of(counts: AttainmentStatus) -> str:
    """Return how many of those that finished were in time."""
    share = f" ({counts.in_time / counts.finished:.1%})" if counts.finished else ""
    return f"{counts.in_time} of {counts.finished}{share}"


def _miscount_lines(engine: EngineStatus) -> list[tuple[str, str]]:
    """Return a line about counts that cannot both be right, nothing while they agree."""
    if not engine.miscounted:
        return []
    apart = f"{engine.miscounted} draft tokens counted otherwise than by vLLM: acceptance here is not to be trusted"
    return [("MISCOUNT", f"{apart}; please report the engine's log with vLLM's and FASER's versions")]
