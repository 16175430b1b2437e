"""What `faser demo` was asked for, and whether that can be done.

Made by the CLI, followed by controller/demo/demo.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import UsageError

MOST_RANKS: Final = 8  # beyond, a laptop's memory ends before anything is seen
METHODS: Final = ("eagle3", "eagle", "draft_model", "ngram")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `faser demo` was asked for; None means the default."""

    duration_s: float = 60.0
    policy: str | None = None
    seed: int = 0
    peak_rps: float | None = None
    json: bool = False
    method: str | None = None
    drafter: str | None = None
    splits: str = ""
    output: Path | None = None
    config: Path | None = None
    has_classes: bool = False
    interactive_share: float = 0.25  # of the requests, with classes
    has_comparison: bool = True  # with plain vLLM, in a second run
    stages: int = 0  # ranks of a pipeline whose stages move; 0: no pipeline
    has_tour: bool = False  # each mechanism forced on in turn

    def __post_init__(self) -> None:
        if not (math.isfinite(self.duration_s) and 1.0 <= self.duration_s <= 1200.0):
            raise UsageError(f"--duration {self.duration_s:g}", "1 to 1200 seconds")
        if self.stages and not 2 <= self.stages <= MOST_RANKS:
            raise UsageError(f"--stages {self.stages}", f"2 to {MOST_RANKS} ranks")
        self._require_no_other_load()
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}", "0 or more")
        if self.peak_rps is not None and not 0.1 <= self.peak_rps <= 1000.0:
            raise UsageError(f"--peak-rps {self.peak_rps:g}", "0.1 to 1000 requests per second")
        if not 0.0 < self.interactive_share < 1.0:
            raise UsageError(f"--interactive-share {self.interactive_share:g}", "between 0 and 1")
        if self.method is not None and self.method not in METHODS:
            raise UsageError(f"--method {self.method}", " or ".join(METHODS))
        if self.method == "ngram" and self.drafter is not None:
            raise UsageError("--drafter with --method ngram", "none: ngram looks drafts up in the text")
        if self.method in ("draft_model", "eagle") and self.drafter is None:
            raise UsageError(f"--method {self.method} without a drafter", "a folder", "pass --drafter FOLDER")
        if self.drafter is not None and not Path(self.drafter).expanduser().is_dir():
            raise UsageError(f"--drafter {self.drafter}", "a folder with a model that vLLM loads")

    def _require_no_other_load(self) -> None:
        """Raise UsageError where options of the usual load stand beside --stages or --tour, which have their own."""
        given = {
            "--classes": self.has_classes, "--splits": self.splits, "--method": self.method, "--drafter": self.drafter,
            "--peak-rps": self.peak_rps,
        }  # fmt: skip
        if self.has_tour:
            given |= {"--stages": self.stages, "--policy": self.policy}
        owner = "--tour" if self.has_tour else "--stages" if self.stages else ""
        if owner and (other := next((name for name, value in given.items() if value), None)):
            raise UsageError(f"{other} with {owner}", "one of the two", f"drop {other}: {owner} has its own load")
