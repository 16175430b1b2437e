"""`faser sidecar`: the daemon as a process: threads, logging and signals around one Daemon.

Called by the CLI; `faser demo` starts it as a child. Numerical libraries get one thread before they are imported:
on a busy machine a second one costs the decision path a factor of 100.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Final

from ..config import Config
from .logs import set_up_logging

if TYPE_CHECKING:
    from .daemon import Daemon
    from .web import WebServer

THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# The store's thread may hold the interpreter this long while a record waits; Python's default is 5 ms.
SWITCH_INTERVAL_S: Final = 0.0005
# New objects before a collection, and collections of one generation before one of the next. Records and decisions are
# freed by their reference counts; with Python's default of 700 every second record would pay for a collection.
COLLECTED_AT: Final = (20_000, 20, 20)

logger = logging.getLogger(__name__)


def run_sidecar(config: Config, reload: Callable[[], Config], interrupts: Sequence[int]) -> int:
    """Serve until SIGTERM or SIGINT, then give the leases back, flush the store and return 0.

    :param reload: reads the configuration again, for SIGHUP; what it raises rejects the change.
    :param interrupts: signals that are noted until it serves; after one it ends as soon as it could.
    """
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    set_up_logging(config.log)
    from .daemon import Daemon

    daemon = Daemon(config, reload)
    http = _start_http(config, daemon)
    gc.freeze()  # the collector need not walk the imported modules while a record waits
    gc.set_threshold(*COLLECTED_AT)

    def stop(number: int, frame: FrameType | None) -> None:
        daemon.stop()

    def read_again(number: int, frame: FrameType | None) -> None:
        daemon.reload()

    signal.signal(signal.SIGHUP, read_again)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    if interrupts:
        daemon.stop()
    try:
        logger.info("sidecar listens on %s, policy %s", config.link.endpoint, config.policy.spec)
        daemon.run()
    finally:
        if http is not None:
            http.close()
        daemon.close()
    logger.info("sidecar ended, leases given back")
    return 0


def _start_http(config: Config, daemon: Daemon) -> WebServer | None:
    """Start the HTTP side where one is configured; what is wrong with it ends the start."""
    if not config.http.listen:
        return None
    from .web import WebServer

    try:
        server = WebServer(config.http, config.link)
    except BaseException:
        daemon.close()
        raise
    logger.info("HTTP on port %d of %s", server.port, config.http.listen)
    return server
