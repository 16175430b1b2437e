"""Runs FASER's hooks inside a vLLM model runner: what fails there is counted and logged, and never raised."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

REPORT_LIMIT: Final = 1  # log lines per failing hook; further failures are only counted


class HookGuard:
    """The guard of one runner; `faults` counts failures by the hook's name."""

    def __init__(self, runner: str, logger: logging.Logger) -> None:
        self.faults: Counter[str] = Counter()
        self._runner, self._logger = runner, logger

    def __call__(self, name: str, hook: Callable[[], None]) -> None:
        """Run a hook."""
        try:
            hook()
        except Exception:
            self.faults[name] += 1
            if self.faults[name] <= REPORT_LIMIT:
                self._logger.exception("FASER's %s failed in the %s; vLLM goes on without it", name, self._runner)
