"""Where the `faser` command starts: Ctrl-C while Python still imports ends it without a traceback."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line; until it is there, Ctrl-C has the meaning it has for any program."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not where the shell said to ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli.main import main as run

    signal.signal(signal.SIGINT, handler)
    run()
