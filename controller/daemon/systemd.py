"""Tells systemd that the sidecar is ready, alive or stopping (sd_notify): a no-op outside a unit of Type=notify.

Called by the daemon's loop, so that a loop that hangs is restarted by the unit's watchdog. Never waits, never raises.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


class Notifier:
    """The socket named by NOTIFY_SOCKET, and how often WATCHDOG_USEC wants a sign of life."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        usec = environment.get("WATCHDOG_USEC", "")
        self._interval_s = int(usec) / 2e6 if usec.isdecimal() and int(usec) else 0.0
        self._next_s = 0.0

    def ready(self) -> None:
        """Say that engines can connect."""
        self._send("READY=1")

    def beat(self, now_s: float) -> None:
        """Say that the loop goes round, as often as the watchdog wants to hear it."""
        if self._interval_s and now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """Say that the end is intended."""
        self._send("STOPPING=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        name = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto(state.encode(), name)
