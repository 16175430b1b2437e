"""The socket on which status questions and orders come, one frame each, and are answered.

Owned by the daemon's loop, which polls it. Whoever asks may be gone before the answer: that is nobody's fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import zmq

from .endpoint import Endpoint
from .status_orders import MAX_ORDER_BYTES

MOST_AT_ONCE: Final = 16  # engines come first
OPTIONS: Final = ((zmq.LINGER, 0), (zmq.RCVHWM, 64), (zmq.SNDHWM, 16), (zmq.MAXMSGSIZE, MAX_ORDER_BYTES))


class Questions:
    """A bound ROUTER; closed with its context."""

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
