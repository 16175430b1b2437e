"""The drafter's confidence on held-out prompts, in the real engine.

    python benchmarks/confidence_engine.py [--curve docs/confidence.svg] [--json FILE]

Every request drafts four tokens at every step; AUC and calibration error by position, greedy and at T = 0.7.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafter_acceptance import chosen_texts
from embedded_engine import chat, start_engine

from faser.controller.engine.machine import provenance
from faser.engine_adapter.protocol import FromController, FromEngine, StepRecord

K_MAX = 4
TEMPERATURES = (0.0, 0.7)
SETTINGS = "eager, bfloat16, k_max 4, embedded pair, held-out prompts of five kinds up to 600 tokens"


@dataclass
class Sidecar:
    """Stands in for the engine's link: keeps records, and answers nothing."""

    records: list[StepRecord] = field(default_factory=list)
    dropped: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def send(self, message: FromEngine) -> None:
        """Take a record."""
        if isinstance(message, StepRecord):
            self.records.append(message)

    def send_later(self, make: Callable[[], FromEngine], rest_s: float = 0.0) -> None:
        """Take a record that is still to be made."""
        self.send(make())

    def receive(self) -> list[FromController]:
        """Return no action set."""
        return []

    def close(self, wait_s: float = 0.0) -> None:
        """Nothing to close."""


def measure_quality(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every position, by temperature; draw the greedy curves."""
    texts = [text for kind in chosen_texts(options.prompts, 1, 600, None).values() for text in kind]
    os.environ |= {"FASER_DEFAULT_K": str(K_MAX), "FASER_ENDPOINT": "tcp://127.0.0.1:9"}  # where nobody listens
    engine = start_engine(K_MAX, 16, max_model_len=1024, enable_prefix_caching=False)
    from faser.controller.calibrate.confidence_report import draw, judge, quality

    sidecar, steering = Sidecar(), engine.llm_engine.engine_core.engine_core.scheduler.steering
    steering.link.close()
    steering.link = sidecar
    found = {}
    for temperature in TEMPERATURES:
        sidecar.records.clear()
        seed = 1 if temperature else None
        chat(engine, texts, temperature=temperature, max_tokens=options.max_tokens, seed=seed)
        judged = judge((record.rows for record in sidecar.records), K_MAX)
        qualities = [quality(position, one) for position, one in enumerate(judged, start=1)]
        found[f"{temperature:g}"] = [asdict(one) for one in qualities]
        if options.curve is not None and not temperature:
            draw(qualities, options.curve)
        for one in qualities:
            print(
                f"T={temperature:g} position {one.position}: {one.tokens} tested, {one.rejected} rejected, AUC "
                f"{one.auc:.3f} ({one.auc_low:.3f}-{one.auc_high:.3f}), calibration error raw {one.raw_error:.3f}, "
                f"online {one.error:.3f}",
                flush=True,
            )
    return {"prompts": len(texts), "max_tokens": options.max_tokens, "by_temperature": found}


def main() -> None:
    """Print the figures and, if asked, write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12, help="of each of the five kinds")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--curve", type=Path, help="write the greedy reliability curves here, as SVG")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    found = measure_quality(options)
    if options.json is not None:
        options.json.write_text(
            json.dumps(provenance() | {"settings": SETTINGS} | found, indent=1, default=_plain) + "\n"
        )


def _plain(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else str(value)


if __name__ == "__main__":
    main()
