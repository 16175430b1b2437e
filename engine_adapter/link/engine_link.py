"""The engine's end of the ZeroMQ link: hands messages over and picks them up without ever waiting.

Used by `Steering` on the engine thread. Codec and socket live in one daemon thread, because after a forward pass every
cache is cold: on the engine thread they cost 80 us of its 150 us per step (benchmarks/adapter.py). What cannot be
sent now is dropped and counted; the engine thread never touches the socket.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..operator_log import operator_log
from ..protocol import FromController, FromEngine, ProtocolError, decode_from_controller, encode
from .keys import EngineKeys
from .quiet_moment import NEXT_S, QUIET_MOMENTS, heard, wait

logger = operator_log(__name__)

# An action set for 4096 requests is about 45 KB; anything larger is not ours and libzmq drops the peer.
MAX_INCOMING_BYTES: Final = 1 << 16
HIGH_WATER_MARK: Final = 64  # messages each way; a stopped sidecar costs at most this many stale records
INBOX_LIMIT: Final = 8  # messages the engine looks at per step; of a flood only the newest stay
CLOSE_S: Final = 0.1
# TCP's own keepalive, and no ZMTP heartbeats: those end a healthy connection whose queue is full, and libzmq may then
# abort the whole process (zeromq/libzmq#3937), which here would be the engine. Without meaning on ipc.
NOTICE_DEAD_HOSTS: Final = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 5),
    (zmq.TCP_KEEPALIVE_INTVL, 2),
    (zmq.TCP_KEEPALIVE_CNT, 3),
    (zmq.TCP_MAXRT, 10_000),
)
# libzmq counts nothing that it drops. Over a frame above MAX_INCOMING_BYTES, or bytes that are no ZeroMQ, it gives the
# connection up for good; after any other end it says at once that it will try again. Silence so long tells them apart.
CUT_OFF: Final = "cut_off"
TRIES_AGAIN_S: Final = 0.25
MONITORED: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CONNECTED
LINGER_MS: Final = 80  # at the end only: what was sent last, the goodbye, is still on its way to the socket


class EngineLink:
    """A DEALER that connects to the sidecar's ROUTER and names itself by the engine's boot id.

    `dropped` counts what could not be sent, `refused` what was received and was not a valid message, by reason; the
    reason CUT_OFF is a connection that libzmq gave up over what came.
    """

    def __init__(self, endpoint: str, boot_id: str, keys: EngineKeys | None = None) -> None:
        self.dropped = 0
        self.refused: Counter[str] = Counter()
        self._outbox: deque[FromEngine | Callable[[], FromEngine]] = deque()
        self._inbox: deque[FromController] = deque(maxlen=INBOX_LIMIT)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._quiet_moment = QUIET_MOMENTS.open()
        self._hears_quiet_moments = False  # one was not long ago: what may rest needs no waking of the thread
        self._next_s = 0.0  # by when another one must have begun
        self._rest_s = 0.0  # asked for by the newest message that woke the thread
        self._closing = False
        self._endpoint = endpoint
        self._cut_off_s: float | None = None  # when a lost connection that nobody tries again counts as cut off
        self._context = zmq.Context()
        try:
            self._socket = self._connected(boot_id, keys)
        except Exception:
            self._context.destroy(linger=0)
            os.close(self._wake)
            QUIET_MOMENTS.close(self._quiet_moment)
            raise
        self._thread = threading.Thread(target=self._run, name="faser-link", daemon=True)
        self._thread.start()

    def _connected(self, boot_id: str, keys: EngineKeys | None) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, HIGH_WATER_MARK),
            (zmq.RCVHWM, HIGH_WATER_MARK),
            (zmq.MAXMSGSIZE, MAX_INCOMING_BYTES),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 1000),
            *NOTICE_DEAD_HOSTS,
        ):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.ROUTING_ID, boot_id.encode())
        if keys is not None:
            keys.apply(socket)
        self._monitor = socket.get_monitor_socket(MONITORED)
        socket.connect(self._endpoint)
        return socket

    def send(self, message: FromEngine) -> None:
        """Hand a message over to be sent; drop and count it if too many wait already."""
        self._hand_over(message)

    def send_later(self, make: Callable[[], FromEngine], rest_s: float = 0.0) -> None:
        """Have the link's thread make a message and send it, as `send` does; what is dropped is not made.

        :param rest_s: first wait so long or for a quiet moment, lest this thread take the interpreter from the engine's
        """
        self._hand_over(make, rest_s)

    def _hand_over(self, message: FromEngine | Callable[[], FromEngine], rest_s: float = 0.0) -> None:
        if self._closing or len(self._outbox) >= HIGH_WATER_MARK:
            self.dropped += 1
            return
        self._outbox.append(message)
        # To wake the thread is to have it ask for the interpreter while the engine's thread prepares its next step.
        if rest_s and self._hears_quiet_moments:
            return
        self._rest_s = rest_s
        os.eventfd_write(self._wake, 1)

    def receive(self) -> list[FromController]:
        """Return the messages that have arrived, oldest first."""
        messages: list[FromController] = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        return messages

    def close(self, wait_s: float = CLOSE_S) -> None:
        """Send what waits and give the socket back; the caller waits `wait_s` at most, whatever the peer does."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        os.eventfd_write(self._quiet_moment, 1)  # nobody rests any more
        self._thread.join(wait_s)
        if not self._thread.is_alive():  # only this thread closes them: the other may be done before the write above
            os.close(self._wake)
            QUIET_MOMENTS.close(self._quiet_moment)

    def _run(self) -> None:
        give_way()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for descriptor in self._wake, self._quiet_moment, self._monitor:
            poller.register(descriptor, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(self._patience_ms()))
            if self._quiet_moment in ready or (self._hears_quiet_moments and time.monotonic() >= self._next_s):
                # First listen, then send what waits: nothing is handed over in between and left behind.
                self._hears_quiet_moments, self._next_s = heard(self._quiet_moment), time.monotonic() + NEXT_S
                self._send_waiting()
            if self._wake in ready:
                os.eventfd_read(self._wake)
                if self._rest_s and not self._closing:
                    wait(self._quiet_moment, self._rest_s)
                self._send_waiting()  # only now: what woke the thread besides must not cut the rest short
            if self._socket in ready:
                self._take_arrived()
            if self._monitor in ready:
                self._watch()
            if self._cut_off_s is not None and time.monotonic() >= self._cut_off_s:
                self._begin_anew()
        self._send_waiting()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)
        self._context.term()

    def _patience_ms(self) -> int | None:
        """Return how long to wait for anything, None: for ever."""
        waits = [TRIES_AGAIN_S] * (self._cut_off_s is not None)
        if self._hears_quiet_moments:
            waits.append(max(self._next_s - time.monotonic(), 0.0))
        return math.ceil(1e3 * min(waits)) if waits else None

    def _watch(self) -> None:
        """Note from the newest event whether the connection was lost, and whether libzmq tries it again."""
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
                is_lost = event["event"] == zmq.EVENT_DISCONNECTED
                self._cut_off_s = time.monotonic() + TRIES_AGAIN_S if is_lost else None

    def _begin_anew(self) -> None:
        """Connect again after libzmq gave up, and count it."""
        self._cut_off_s = None
        self._refuse(ProtocolError(CUT_OFF, f"a frame above {MAX_INCOMING_BYTES} bytes, or bytes that are no ZeroMQ"))
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(self._endpoint)
        try:
            self._socket.connect(self._endpoint)
        except zmq.ZMQError:
            logger.exception("FASER could not connect to its sidecar again; the engine's default lengths hold")

    def _send_waiting(self) -> None:
        while self._outbox:
            try:
                message = self._outbox.popleft()
                self._socket.send(encode(message() if callable(message) else message), zmq.NOBLOCK)
            except zmq.Again:
                self.dropped += 1
            except Exception:
                self.dropped += 1
                logger.exception("FASER could not send a message; it is dropped")

    def _take_arrived(self) -> None:
        for _ in range(HIGH_WATER_MARK):
            try:
                self._inbox.append(decode_from_controller(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return
            except ProtocolError as error:
                self._refuse(error)

    def _refuse(self, error: ProtocolError) -> None:
        self.refused[error.reason] += 1
        if self.refused[error.reason] == 1:
            logger.warning("FASER refused a message (%s); further ones are only counted", error)


def give_way() -> None:
    """Let the calling thread not take a core from the engine's thread, which wakes it; an idle one it takes at once."""
    if os.sched_getscheduler(0) == os.SCHED_OTHER:  # whoever chose another class for the engine meant it
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
