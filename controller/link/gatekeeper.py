"""Who may speak: CURVE's allow-list (ZAP, RFC 27) and a limit of frames per engine.

Called by the daemon and by its router. The gatekeeper's thread answers libzmq's question for every new connection;
the list is replaced whole, without a restart. Nothing here looks at what a message says.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from typing import Final

import zmq
from zmq.utils import z85

from ..decision.audit import audit_event
from .keys import Keyring

logger = logging.getLogger(__name__)

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
POLL_MS: Final = 100
ZAP_FRAMES: Final = 7  # version, request id, domain, address, identity, mechanism, the client's key
MAX_IDENTITIES: Final = 4096


class Gatekeeper:
    """Answers ZAP requests of one context, for as long as it is open."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keyring: Keyring) -> None:
        self.keyring = keyring
        self.refused: Counter[str] = Counter()
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ADDRESS)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="faser-gatekeeper", daemon=True)
        self._thread.start()

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is not bound yet demand keys."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keyring.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"faser")

    def renew(self, keyring: Keyring) -> bool:
        """Take another list; return whether connections there are now must be made anew."""
        before, self.keyring = self.keyring, keyring
        audit_event("keys", allowed=len(keyring.allowed))
        return before.secret != keyring.secret or bool(before.allowed - keyring.allowed)

    def close(self) -> None:
        """Let nobody in any more."""
        self._is_closing.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            try:
                if self._socket.poll(POLL_MS):
                    self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
            except zmq.ZMQError as error:
                if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                    return
                logger.exception("the gatekeeper could not answer")

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, number = (*request, b"", b"")[:2]
        reason = self._refusal(request)
        if reason:
            self.refused[reason] += 1
            if self.refused[reason] == 1:
                audit_event("refused", reason=reason, detail="a connection; further ones are only counted")
            return [version, number, b"400", reason.encode(), b"", b""]
        return [version, number, b"200", b"OK", z85.encode(request[6]), b""]

    def _refusal(self, request: list[bytes]) -> str:
        if len(request) != ZAP_FRAMES or request[5] != b"CURVE" or len(request[6]) != 32:
            return "no_key"
        return "" if z85.encode(request[6]) in self.keyring.allowed else "unknown_key"


class RateLimit:
    """A bucket of frames per identity: `per_s` flow in, four seconds' worth fit.

    Identities are chosen by peers: the least lately seen one is forgotten beyond MAX_IDENTITIES.
    """

    def __init__(self, per_s: float) -> None:
        self._buckets: OrderedDict[bytes, list[float]] = OrderedDict()  # [frames left, when]
        self.set(per_s)

    def set(self, per_s: float) -> None:
        """Take another limit."""
        self._per_s = per_s
        self._burst = 4.0 * per_s

    def admits(self, identity: bytes, now_s: float) -> bool:
        """Count a frame; return whether it is to be read."""
        bucket = self._buckets.get(identity)
        if bucket is None:
            if len(self._buckets) >= MAX_IDENTITIES:
                self._buckets.popitem(last=False)
            bucket = self._buckets[identity] = [self._burst, now_s]
        else:
            self._buckets.move_to_end(identity)
        left = min(bucket[0] + (now_s - bucket[1]) * self._per_s, self._burst)
        bucket[1] = now_s
        if left < 1.0:
            bucket[0] = left
            return False
        bucket[0] = left - 1.0
        return True
