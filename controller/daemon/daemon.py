"""The sidecar's loop, the only one: sockets, clock and presence; everything that decides is pure and lives elsewhere.

Called by sidecar.run_sidecar and, in a thread, by tests. It never waits for an engine, a disk or a status reader,
and never ends because of what a peer sends.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import zmq

from ... import __version__
from ...engine_adapter.protocol import Goodbye, Hello, HelloRequest, Release, StepRecord
from ..config import Config, require_files
from ..decision.audit import DecisionNote, audit_event
from ..decision.decide import Decision, LeaseTerms
from ..decision.governor import Governor
from ..decision.modes import ModeBoard, engine_name
from ..decision.session import Session, check_policy
from ..errors import FaserError
from ..link.endpoint import IPC, Endpoint, status_address
from ..link.engine_router import EngineRouter, Incoming
from ..link.gatekeeper import Gatekeeper
from ..link.keys import load_keyring
from ..link.status_orders import Questions, Refusal, carry_out, decode_order
from ..objectives import parse_objectives
from ..snapshot import (
    QUESTION,
    SNAPSHOT_VERSION,
    LinkStatus,
    Snapshot,
    encode_snapshot,
)
from ..telemetry.store import EngineEntry, StepEntry
from .ledger import Ledger
from .reload import Prepared, prepare
from .span_notes import StageClock, TraceNote
from .systemd import Notifier
from .warm_up import warm_up

logger = logging.getLogger(__name__)

TICK_S: Final = 0.1  # longest wait for a frame; signals and presence are looked at between two waits
ASK_AGAIN_S: Final = 1.0  # an unknown engine is asked for its hello this often
LINGER_MS: Final = 200  # for the releases at the end
MAX_UNKNOWN: Final = 1024
ENGINES_BEHIND: Final = 4  # so many that wait for an answer at once, and the store stands aside for a moment
ASIDE_S: Final = 0.01


@dataclass(slots=True)
class _Batch:
    """What one drain brought of one engine: records in order; the last one is decided on."""

    session: Session
    records: list[StepRecord] = field(default_factory=list)


class Daemon:
    """One life of the sidecar: owns its endpoint and its telemetry file from construction to close."""

    def __init__(self, config: Config, reload: Callable[[], Config] | None = None) -> None:
        check_policy(config.policy.spec)
        self._objectives = parse_objectives(config.objectives.classes, heeds_own=config.objectives.own)
        require_files(config)
        warm_up(config.policy.spec)
        # Time since the host booted, which cannot be set back; an engine that obeyed a higher one says so in its hello.
        self.epoch = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self._config = config
        self._started_s = time.monotonic()
        self._is_stopping = threading.Event()
        self._read_config = reload
        self._is_to_reload = threading.Event()
        self._sessions: dict[bytes, Session] = {}
        self._asked_s: OrderedDict[bytes, float] = OrderedDict()  # unknown identities
        self._dropped: Counter[str] = Counter()
        self._next_look_s = 0.0
        self._notifier = Notifier()
        self._poller = zmq.Poller()
        self._board = ModeBoard(config.mode.default, config.mode.state)  # type: ignore[arg-type]
        with ExitStack() as opened:
            keyring = load_keyring(Path(config.link.keys)) if config.link.keys else None
            endpoint = opened.enter_context(Endpoint(config.link.endpoint, is_encrypted=keyring is not None))
            status = opened.enter_context(Endpoint(status_address(config.link.endpoint, config.link.status_endpoint)))
            self._takes_orders = status.address.startswith(IPC)
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            opened.callback(context.destroy, linger=LINGER_MS)  # closes every socket: term alone would wait for them
            self._gatekeeper = Gatekeeper(context, keyring) if keyring is not None else None
            if self._gatekeeper is not None:
                opened.callback(self._gatekeeper.close)
            self._router = EngineRouter(
                context, endpoint, config.link.queue_frames, self._gatekeeper, config.link.frames_per_s
            )
            self._questions = Questions(context, status)
            self._ledger = Ledger(config, self.epoch)
            self._opened = opened.pop_all()

    def run(self) -> None:
        """Serve until `stop` is called."""
        poller = self._poller
        poller.register(self._router.socket, zmq.POLLIN)
        poller.register(self._questions.socket, zmq.POLLIN)
        self._notifier.ready()
        while not self._is_stopping.is_set():
            ready = dict(poller.poll(int(TICK_S * 1e3)))
            self._serve_engines(time.monotonic())
            if self._questions.socket in ready:
                self._questions.answer(self._reply)
            self._look_after_engines(time.monotonic())

    def stop(self) -> None:
        """Make `run` return soon; safe in signal handlers and from other threads."""
        self._is_stopping.set()
        self._notifier.stopping()

    def reload(self) -> None:
        """Have the loop read its configuration again soon; safe in signal handlers and from other threads."""
        self._is_to_reload.set()

    def _reload_if_asked(self) -> None:
        if self._read_config is None or not self._is_to_reload.is_set():
            return
        self._is_to_reload.clear()
        try:
            prepared = prepare(self._config, self._read_config(), self._sessions)
        except FaserError as error:
            logger.error("the changed configuration is rejected, the one in force stays: %s", error)
            audit_event("reload", is_taken=False, detail=str(error))
            return
        self._put_in_force(prepared)

    def _put_in_force(self, prepared: Prepared) -> None:
        config, self._objectives = prepared.config, prepared.objectives
        self._config = config
        self._board.set_default(config.mode.default)  # type: ignore[arg-type]
        self._router.limit(config.link.frames_per_s)
        for identity, session in self._sessions.items():
            session.follow(prepared.policies.get(identity, session.policy))
            session.promise(self._objectives)
            session.governor.configure(LeaseTerms(config.lease.steps, config.lease.ms), config.mode, config.guard)
        if self._gatekeeper is not None and prepared.keyring is not None and self._gatekeeper.renew(prepared.keyring):
            self._poller.unregister(self._router.socket)
            self._router.reopen()
            self._poller.register(self._router.socket, zmq.POLLIN)
        changed = ", ".join(prepared.changed) or "nothing"
        logger.info("configuration read again: %s changed", changed)
        self._ledger.follow(config, changed)

    def close(self) -> None:
        """Give every lease back, write what waits and free all that is owned."""
        for identity, session in self._sessions.items():
            if not session.is_over() and session.governor.has_lease:
                self._router.send(identity, Release(session.hello.boot_id, session.epoch))
        self._opened.close()
        self._board.close()
        self._ledger.close()

    # -- engines ------------------------------------------------------------------------------------------------

    def _serve_engines(self, now_s: float) -> None:
        batches: dict[bytes, _Batch] = {}
        for incoming in self._router.drain():
            if isinstance(incoming.message, StepRecord):
                self._collect(batches, incoming.identity, incoming.message, now_s)
            else:
                self._meet_or_part(incoming, now_s)
        if len(batches) >= ENGINES_BEHIND:
            self._ledger.stand_aside(now_s + ASIDE_S)
        for identity, batch in batches.items():
            self._answer(identity, batch)

    def _collect(self, batches: dict[bytes, _Batch], identity: bytes, record: StepRecord, now_s: float) -> None:
        session = self._sessions.get(identity)
        if session is None:
            self._dropped["unknown_engine"] += 1
            self._ask_for_hello(identity, now_s)
            return
        if session.may_obey_another(record):
            self._ask_for_hello(identity, now_s)
        if session.admit(record, now_s):
            batches.setdefault(identity, _Batch(session)).records.append(record)
        else:
            self._dropped["late"] += 1

    def _ask_for_hello(self, identity: bytes, now_s: float) -> None:
        if now_s - self._asked_s.get(identity, -ASK_AGAIN_S) < ASK_AGAIN_S:
            return
        self._asked_s[identity] = now_s
        self._asked_s.move_to_end(identity)
        if len(self._asked_s) > MAX_UNKNOWN:
            self._asked_s.popitem(last=False)
        self._router.send(identity, HelloRequest(self.epoch))

    def _meet_or_part(self, incoming: Incoming, now_s: float) -> None:
        session = self._sessions.get(incoming.identity)
        if isinstance(incoming.message, Hello):
            self._welcome(incoming.identity, incoming.message, session, now_s)
        elif isinstance(incoming.message, Goodbye) and session is not None:
            session.stop(now_s)
            self._ledger.notice(session.hello.boot_id, "goodbye", "the engine stopped")

    def _welcome(self, identity: bytes, hello: Hello, session: Session | None, now_s: float) -> None:
        if session is not None and hello.epoch <= session.epoch:  # it was asked twice: what is known about it holds
            session.heard_s = now_s
            return
        if session is None and not self._has_room():
            self._dropped["too_many_engines"] += 1
            if self._dropped["too_many_engines"] == 1:  # each of them asks again every second
                logger.warning(
                    "engine %s is not served: %d engines already are (link.max_engines); further ones are only counted",
                    *(hello.boot_id, len(self._sessions)),
                )
            return
        self._asked_s.pop(identity, None)
        config = self._config
        session = Session(hello, config.policy.spec, config.lease, self.epoch, now_s, self._objectives)
        session.governor = Governor(hello, session.governor.terms, self._board, config.mode, config.guard)
        self._sessions[identity] = session
        self._ledger.record(EngineEntry(hello, self._ledger.clock.now_ns()))
        logger.info(
            "engine %s: %s with %s (%s), k_max %d, vLLM %s on %s, pid %d",
            *(hello.boot_id, hello.model, hello.drafter, hello.method, hello.k_max),
            *(hello.vllm_version, hello.device, hello.pid),
        )

    def _answer(self, identity: bytes, batch: _Batch) -> None:
        """Decide on the newest record and send; figures and telemetry come after, off the engine's critical path."""
        session, newest = batch.session, batch.records[-1]
        watch = StageClock()
        received_ns = self._ledger.clock.now_ns()
        for record in batch.records[:-1]:
            session.observe(record)
        watch.lap("observe")
        decision = session.decide(newest)
        watch.lap("decide")
        self._give_back(identity, session)
        is_sent, entry = False, None
        if decision is not None:
            is_sent = session.governor.is_sending and self._router.send(identity, decision.action_set)
            if session.governor.is_sending:
                session.note_sent(is_sent, time.monotonic())
            watch.lap("send")
            entry = StepEntry(
                newest, received_ns, decision.action_set, decision.reason, session.decision_s[-1], is_sent,
                self._config.policy.spec, session.governor.draws,
            )  # fmt: skip
            if self._ledger.audit is not None:
                policy = self._config.policy.spec
                self._ledger.audit.put(
                    DecisionNote(newest, decision.action_set, policy, decision.reason, is_sent, received_ns)
                )
        session.learn()
        watch.lap("learn")
        for record in batch.records:
            session.measure(record)
            if entry is None or record is not newest:
                self._ledger.record_step(StepEntry(record, received_ns))
            else:
                self._ledger.record_step(entry)
        watch.lap("record")
        if decision is not None and self._ledger.traces is not None:
            self._ledger.traces.put(self._trace(batch, decision, is_sent, watch))

    def _trace(self, batch: _Batch, decision: Decision, is_sent: bool, watch: StageClock) -> TraceNote:
        governor, lengths = batch.session.governor, decision.action.lengths
        return TraceNote(
            engine_name(batch.session.hello), batch.records[-1], decision.action_set, self._config.policy.spec,
            decision.reason, int(lengths.sum()), len(lengths), len(batch.records) - 1, governor.lag_s, is_sent, watch,
        )  # fmt: skip

    def _give_back(self, identity: bytes, session: Session) -> None:
        """Release a lease that the sidecar does not stand by any more: switched, or the guard fell back."""
        if session.governor.owes_release():
            self._router.send(identity, Release(session.hello.boot_id, session.epoch))
            reason = session.governor.reason or session.governor.mode
            self._ledger.notice(session.hello.boot_id, "released", reason)

    # -- presence -----------------------------------------------------------------------------------------------

    def _look_after_engines(self, now_s: float) -> None:
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + TICK_S
        self._notifier.beat(now_s)
        self._reload_if_asked()
        for identity, session in list(self._sessions.items()):
            before = session.presence
            presence = session.update_presence(now_s, self._config.link.silent_after_s)
            if presence and {presence, before} & {"silent", "gone", "stopped"}:  # busy and idle alternate all day
                self._ledger.notice(session.hello.boot_id, presence, f"was {before}")
            if session.is_over() and now_s - session.changed_s > self._config.link.forget_after_s:
                del self._sessions[identity]

    def _has_room(self) -> bool:
        return len(self._sessions) < self._config.link.max_engines or self._forget_one_that_is_over()

    def _forget_one_that_is_over(self) -> bool:
        over = [identity for identity, session in self._sessions.items() if session.is_over()]
        for identity in over[:1]:
            del self._sessions[identity]
        return bool(over)

    # -- status -------------------------------------------------------------------------------------------------

    def _reply(self, question: bytes) -> bytes | None:
        """Return the answer to a status question or an order, None where it is neither."""
        if question == QUESTION:
            return encode_snapshot(self.snapshot())
        if (order := decode_order(question)) is None:
            return None
        if not self._takes_orders:
            return msgspec.json.encode(Refusal("orders are taken on an ipc:// status endpoint only; set it so"))
        known = {name for each in self._sessions.values() for name in (each.hello.boot_id, engine_name(each.hello))}
        if fault := carry_out(order, self._board, known):
            return msgspec.json.encode(Refusal(fault))
        audit_event("switch", target=order.target, mode=order.mode, by=order.by)
        for identity, session in self._sessions.items():
            session.governor.refresh()
            self._give_back(identity, session)
        return encode_snapshot(self.snapshot())

    def snapshot(self) -> Snapshot:
        """Return what the sidecar sees and does now."""
        now_s = time.monotonic()
        return Snapshot(
            version=SNAPSHOT_VERSION,
            faser_version=__version__,
            pid=os.getpid(),
            epoch=self.epoch,
            uptime_s=now_s - self._started_s,
            policy=self._config.policy.spec,
            link=LinkStatus(
                self._config.link.endpoint,
                self._router.received,
                self._router.sent,
                dict(self._router.dropped + self._dropped),
                self._router.count_disconnects(),
            ),
            store=self._ledger.store_status(),
            engines=[session.status(now_s) for session in self._sessions.values()],
            modes=self._board.switched(),
            default_mode=self._board.default,
            mode_error=self._board.error,
            audit=self._ledger.audit_status(),
        )
