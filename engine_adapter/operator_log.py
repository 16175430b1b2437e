"""Where the engine's side logs: below vLLM's own logger.

Called by every module of this floor that logs. vLLM's configuration gives a handler, and the level INFO, to the logger
"vllm" alone: a line of `faser.…` below WARNING would reach nobody. In a process without vLLM it is a logger like any.
"""

from __future__ import annotations

import logging


def operator_log(module: str) -> logging.Logger:
    """Return the logger of a module, given by its `__name__`, whose lines the operator finds in vLLM's log."""
    return logging.getLogger(f"vllm.{module}")
