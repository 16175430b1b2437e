"""Requests drawn from ServeGen's client windows: rate and burstiness of each client of a production service.

Called by the benchmarks. The published windows hold no requests and no lengths: arrivals are drawn from each
client's own inter-arrival law, lengths are taken, in random order, from another trace.
"""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats
from .request_trace import Trace, TraceError, csv_rows

WINDOW_S: Final = 600.0
COLUMNS: Final = ("client", "window_start_s", "rate_rps", "cv", "dist", "arg1", "arg2")
_SHIPPED: Final = "servegen_m-large_client_windows_week1.csv.gz"
_LAWS: Final = ("Gamma", "Weibull")


@dataclass(frozen=True, slots=True)
class ClientWindow:
    """Ten minutes of one client: `rate_rps` and the shape and scale of the time between its requests."""

    client: int
    start_s: float
    rate_rps: float
    law: str
    shape: float
    scale: float

    def arrivals_s(self, random: np.random.Generator) -> Floats:
        """Draw the window's arrivals: as many as the rate says, as bursty as the law says.

        Gaps are drawn and then stretched to fill the window: drawing until it is full would miss the rate where
        gaps are as long as windows.
        """
        expected = self.rate_rps * WINDOW_S
        count = math.floor(expected) + int(random.random() < expected % 1.0)
        if self.law == "Gamma":
            gaps = random.gamma(self.shape, self.scale, count + 1)
        else:
            gaps = self.scale * random.weibull(self.shape, count + 1)
        times = np.cumsum(gaps)
        return self.start_s + times[:-1] / max(float(times[-1]), 1e-12) * WINDOW_S


def shipped_windows() -> list[ClientWindow]:
    """Return the windows that come with the package: one week of a large language model's service."""
    return read_windows(importlib.resources.files(__package__) / "traces" / _SHIPPED)


def read_windows(file: Traversable) -> list[ClientWindow]:
    """Read windows from CSV; raise TraceError that names file and row."""
    return [_parse(row, f"{file.name}, line {line}") for line, row in csv_rows(file, COLUMNS)]


def _parse(row: list[str], where: str) -> ClientWindow:
    try:
        client, start_s, rate_rps, _, law, shape, scale = row
        window = ClientWindow(int(client), float(start_s), float(rate_rps), law, float(shape), float(scale))
        numbers = (window.rate_rps, window.shape, window.scale)
        if law not in _LAWS or window.start_s < 0 or not all(math.isfinite(n) and n > 0 for n in numbers):
            raise ValueError
    except ValueError:
        raise TraceError(
            f"{where}: {','.join(row)!r}; expected a client, a start, a rate above 0, Gamma or Weibull, two numbers"
        ) from None
    return window


def draw_trace(windows: Sequence[ClientWindow], start_s: float, duration_s: float, lengths: Trace, seed: int) -> Trace:
    """Draw the requests of all clients in [start_s, start_s + duration_s), with the lengths of another trace."""
    random = np.random.default_rng(seed)
    end_s = start_s + duration_s
    touched = [window for window in windows if window.start_s < end_s and window.start_s + WINDOW_S > start_s]
    drawn = [window.arrivals_s(random) for window in touched]
    arrival_s = np.sort(np.concatenate(drawn)) if drawn else np.empty(0)
    arrival_s = arrival_s[(arrival_s >= start_s) & (arrival_s < end_s)]
    if not len(arrival_s):
        raise TraceError(f"no request between {start_s:g} and {end_s:g} s; expected a part of the week with clients")
    picked = random.integers(len(lengths), size=len(arrival_s))
    return Trace("servegen", arrival_s - arrival_s[0], lengths.input_tokens[picked], lengths.output_tokens[picked])
