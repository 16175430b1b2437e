"""The sidecar's end of the wire: a ROUTER that binds; engines are DEALERs named by their boot id.

Called by the daemon's loop. Never blocks and never raises for what a peer does: a frame that is no valid message
is counted by reason and dropped, and so is a message that cannot be sent now.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

import zmq

from ...engine_adapter.link.engine_link import NOTICE_DEAD_HOSTS
from ...engine_adapter.protocol import (
    MAX_FRAME_BYTES,
    FromController,
    FromEngine,
    HelloRequest,
    ProtocolError,
    encode,
)
from ...env.estimate.step_frame import decode
from ..errors import EndpointError
from .endpoint import Endpoint
from .gatekeeper import Gatekeeper, RateLimit

# Frames up to this size are read, counted as oversized and dropped; libzmq disconnects the sender of a larger one.
MAX_INCOMING_BYTES: Final = 2 * MAX_FRAME_BYTES
MAX_FRAMES_PER_DRAIN: Final = 1024  # bounds the time away from signals and status clients when a peer floods us
REBIND_S: Final = 2.0
READABLE: Final = int(zmq.POLLIN)
FIRST_OF_TWO: Final = zmq.NOBLOCK | zmq.SNDMORE  # flags are slow to combine
SEND_QUEUE_FRAMES: Final = 64  # an engine uses the newest action set only: a long queue has no value


@dataclass(frozen=True, slots=True)
class Incoming:
    """A valid message and the socket identity it came from."""

    identity: bytes
    message: FromEngine


class EngineRouter:
    """All engines of this sidecar behind one socket.

    `dropped` counts frames by reason: the protocol's reasons, `multipart`, `rate` and `wrong_identity` on the way in,
    `no_peer` and `queue_full` on the way out. `disconnects` counts connections that ended.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        queue_frames: int,
        gatekeeper: Gatekeeper | None = None,
        frames_per_s: float = 1e6,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self.received = 0
        self.sent = 0
        self.disconnects = 0
        self._rate = RateLimit(frames_per_s)
        self._context, self._endpoint, self._queue_frames, self._gatekeeper = (
            context,
            endpoint,
            queue_frames,
            gatekeeper,
        )
        self._is_reopening = False
        self._open()

    def _open(self) -> None:
        self.socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, self._queue_frames),
            (zmq.SNDHWM, SEND_QUEUE_FRAMES),
            (zmq.MAXMSGSIZE, MAX_INCOMING_BYTES),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),  # an engine that reconnects takes its name with it
            *NOTICE_DEAD_HOSTS,
        ):
            self.socket.setsockopt(option, value)
        if self._gatekeeper is not None:
            self._gatekeeper.protect(self.socket)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._bind()

    def _bind(self) -> None:
        """Bind; libzmq gives an address that was unbound back a moment later."""
        end_s = time.monotonic() + (REBIND_S if self._is_reopening else 0.0)
        while True:
            try:
                self._endpoint.bind(self.socket)
                return
            except EndpointError:
                if time.monotonic() >= end_s:
                    raise
                time.sleep(0.005)

    def limit(self, frames_per_s: float) -> None:
        """Read so many frames of one engine per second from now on."""
        self._rate.set(frames_per_s)

    def reopen(self) -> None:
        """End every connection and listen anew: engines come back by themselves, if their keys still open the door."""
        self.socket.unbind(self._endpoint.address)
        self.close()
        self._is_reopening = True
        self._open()

    def close(self) -> None:
        """End every connection."""
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()

    def drain(self) -> list[Incoming]:
        """Return the valid messages that have arrived, oldest first, at most MAX_FRAMES_PER_DRAIN."""
        messages: list[Incoming] = []
        now_s = time.monotonic()
        for _ in range(MAX_FRAMES_PER_DRAIN):
            if not int(self.socket.getsockopt(zmq.EVENTS)) & READABLE:  # an exception costs several microseconds
                break
            identity = self.socket.recv(zmq.NOBLOCK)
            frame = self._rest()
            self.received += 1
            if not self._rate.admits(identity, now_s):
                self.dropped["rate"] += 1
                continue
            if (incoming := self._decode(identity, frame)) is not None:
                messages.append(incoming)
        return messages

    def _rest(self) -> bytes | None:
        """Return the frame behind an identity, None if there is not exactly one; a quarter of recv_multipart's time."""
        if not self.socket.getsockopt(zmq.RCVMORE):
            return None
        frame: bytes | None = self.socket.recv(zmq.NOBLOCK)
        while self.socket.getsockopt(zmq.RCVMORE):
            frame = None
            self.socket.recv(zmq.NOBLOCK)
        return frame

    def _decode(self, identity: bytes, frame: bytes | None) -> Incoming | None:
        if frame is None:
            self.dropped["multipart"] += 1
            return None
        try:
            message = decode(frame)
        except ProtocolError as error:
            self.dropped[error.reason] += 1
            return None
        if message.boot_id.encode() != identity:
            self.dropped["wrong_identity"] += 1
            return None
        return Incoming(identity, message)

    def send(self, identity: bytes, message: FromController | HelloRequest) -> bool:
        """Hand a message over for one engine; False if it had to be dropped."""
        try:
            content = encode(message)
            self.socket.send(identity, FIRST_OF_TWO)
            self.socket.send(content, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.dropped["no_peer" if error.errno == zmq.EHOSTUNREACH else "queue_full"] += 1
            return False
        self.sent += 1
        return True

    def count_disconnects(self) -> int:
        """Return how many connections have ended so far."""
        while True:
            try:
                self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return self.disconnects
            self.disconnects += 1
