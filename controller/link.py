"""The sidecar's end of the wire: a ROUTER that binds; engines are DEALERs named by their boot id.

Called by the daemon's loop. Never blocks and never raises for what a peer does: a frame that is no valid message
is counted by reason and dropped, and so is a message that cannot be sent now.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import zmq

from ..engine_adapter.protocol import (
    MAX_FRAME_BYTES,
    FromController,
    FromEngine,
    HelloRequest,
    ProtocolError,
    decode_from_engine,
    encode,
)
from .endpoint import Endpoint

# Frames up to this size are read, counted as oversized and dropped; libzmq disconnects the sender of a larger one.
MAX_INCOMING_BYTES: Final = 2 * MAX_FRAME_BYTES
MAX_FRAMES_PER_DRAIN: Final = 1024  # bounds the time away from signals and status clients when a peer floods us
SEND_QUEUE_FRAMES: Final = 64  # an engine uses the newest action set only: a long queue has no value


@dataclass(frozen=True, slots=True)
class Incoming:
    """A valid message and the socket identity it came from."""

    identity: bytes
    message: FromEngine


class EngineRouter:
    """All engines of this sidecar behind one socket.

    `dropped` counts frames by reason: the protocol's reasons, `multipart` and `wrong_identity` on the way in,
    `no_peer` and `queue_full` on the way out. `disconnects` counts connections that ended.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, queue_frames: int) -> None:
        self.dropped: Counter[str] = Counter()
        self.received = 0
        self.sent = 0
        self.disconnects = 0
        self.socket = context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, queue_frames),
            (zmq.SNDHWM, SEND_QUEUE_FRAMES),
            (zmq.MAXMSGSIZE, MAX_INCOMING_BYTES),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),  # an engine that reconnects takes its name with it
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 10000),
        ):
            self.socket.setsockopt(option, value)
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor.setsockopt(zmq.LINGER, 0)
        endpoint.bind(self.socket)

    def drain(self) -> list[Incoming]:
        """Return the valid messages that have arrived, oldest first, at most MAX_FRAMES_PER_DRAIN."""
        messages: list[Incoming] = []
        for _ in range(MAX_FRAMES_PER_DRAIN):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.received += 1
            if (incoming := self._decode(parts)) is not None:
                messages.append(incoming)
        return messages

    def _decode(self, parts: list[bytes]) -> Incoming | None:
        if len(parts) != 2:
            self.dropped["multipart"] += 1
            return None
        identity, frame = parts
        try:
            message = decode_from_engine(frame)
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
            self.socket.send_multipart((identity, encode(message)), zmq.NOBLOCK)
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
