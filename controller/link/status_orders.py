"""The sidecar's status socket, and the orders that come over it: switch a mode. One small JSON frame each.

Sent by `faser mode` and the web page, executed by the daemon's loop. Only a status socket that nobody else can reach
takes orders: an ipc path in a 0700 folder, or one that demands keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec
import zmq

from ...engine_adapter.protocol import Mode
from ..decision.modes import EVERY, ModeBoard
from ..errors import UsageError
from .endpoint import Endpoint

MAX_ORDER_BYTES = 1024
MAX_TARGET = 700  # characters of an engine's name
MAX_BY = 64
MOST_AT_ONCE: Final = 16  # engines come first
OPTIONS: Final = ((zmq.LINGER, 0), (zmq.RCVHWM, 64), (zmq.SNDHWM, 16), (zmq.MAXMSGSIZE, MAX_ORDER_BYTES))


class Switch(msgspec.Struct, tag="switch", frozen=True, forbid_unknown_fields=True):
    """Put an engine into a mode; mode None forgets what was switched before."""

    target: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TARGET)]
    mode: Mode | None
    by: Annotated[str, msgspec.Meta(max_length=MAX_BY)] = ""


class Refusal(msgspec.Struct, frozen=True):
    """The reply to an order that was not carried out."""

    error: str


_decoder = msgspec.json.Decoder(Switch)


def encode_order(order: Switch) -> bytes:
    """Return an order's frame; raise UsageError if a sidecar would not take it for one."""
    frame = msgspec.json.encode(order)
    if len(frame) > MAX_ORDER_BYTES or decode_order(frame) is None:
        seen = f"an engine name of {len(order.target)} characters"
        raise UsageError(seen, f"one of up to {MAX_TARGET}, or {EVERY}", "use the boot id")
    return frame


def decode_order(frame: bytes) -> Switch | None:
    """Return the order of a frame, None if it is none."""
    try:
        return _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def carry_out(order: Switch, board: ModeBoard, known: set[str]) -> str:
    """Switch as ordered; return why not, empty if it is done.

    :param known: boot ids and names of the engines that are there: a mistyped name must not pass in silence.
    """
    if order.target != EVERY and order.target not in known and order.target not in board.switched():
        names = ", ".join(sorted(known)) or "none is connected"
        return f"no engine {order.target!r}; expected {EVERY} or one of: {names}"
    board.switch(order.target, order.mode)
    return ""


class Questions:
    """The bound ROUTER on which questions and orders come; the daemon's loop polls it, and its context closes it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        for option, value in OPTIONS:
            self.socket.setsockopt(option, value)
        endpoint.bind(self.socket)

    def answer(self, reply: Callable[[bytes], bytes | None]) -> None:
        """Answer what waits, at most so many at once; `reply` gives None for what is no question."""
        for _ in range(MOST_AT_ONCE):
            try:
                *envelope, question = self.socket.recv_multipart(zmq.NOBLOCK)
                if (content := reply(question)) is not None:
                    self.socket.send_multipart((*envelope, content), zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing waits, or the asker is gone
                return
