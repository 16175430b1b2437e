"""Request traces of production services: when requests came and how long they were. No text.

Called by env/workload/workload.py and by simulations. Reads CSV (also gzipped) with the columns arrival_s,
input_tokens, output_tokens; a bad row is named by file and line, never skipped.
"""

from __future__ import annotations

import csv
import gzip
import importlib.resources
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ...engine_adapter.errors import UsageError

COLUMNS: Final = ("arrival_s", "input_tokens", "output_tokens")
SHIPPED: Final = {
    "azure-conv": "azure_conv_2023_first_half.csv",
    "azure-code": "azure_code_2023_first_half.csv",
    "mooncake": "mooncake_conversation_first_half.csv",
}
MOONCAKE_TICK_S: Final = 3.0  # its clock; all arrivals of a tick carry the tick's start


class TraceError(UsageError):
    """A trace cannot be used; the message names file and row, what was seen and what was expected."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; three arrays of one length.

    :param arrival_s: (n,) float64, seconds since the trace's start, never decreasing
    :param input_tokens: (n,) int64, prompt lengths
    :param output_tokens: (n,) int64, response lengths
    """

    name: str
    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints

    def __len__(self) -> int:
        return len(self.arrival_s)

    def rows(self, first: int, count: int) -> Trace:
        """Return `count` consecutive rows, with times relative to the first of them."""
        if count < 1 or first < 0 or first + count > len(self):
            raise TraceError(f"{self.name}: rows {first} to {first + count} asked for, the trace has {len(self)}")
        cut = slice(first, first + count)
        start_s = self.arrival_s[first]
        return Trace(self.name, self.arrival_s[cut] - start_s, self.input_tokens[cut], self.output_tokens[cut])

    def window(self, start_s: float, duration_s: float) -> Trace:
        """Return the requests that came in [start_s, start_s + duration_s), with times relative to start_s."""
        inside = (self.arrival_s >= start_s) & (self.arrival_s < start_s + duration_s)
        return Trace(self.name, self.arrival_s[inside] - start_s, self.input_tokens[inside], self.output_tokens[inside])

    def scaled(self, rate: float) -> Trace:
        """Return the trace with its arrival rate multiplied by `rate`."""
        if not (math.isfinite(rate) and rate > 0):
            raise TraceError(f"rate scale {rate}; expected a number above 0")
        return Trace(self.name, self.arrival_s / rate, self.input_tokens, self.output_tokens)

    def smeared(self, tick_s: float, seed: int) -> Trace:
        """Spread arrivals uniformly inside their clock tick; without it a coarse clock looks like bursts."""
        offset_s = np.random.default_rng(seed).uniform(0.0, tick_s, len(self))
        arrival_s = self.arrival_s + offset_s
        order = np.argsort(arrival_s, kind="stable")
        return Trace(self.name, arrival_s[order], self.input_tokens[order], self.output_tokens[order])


def shipped_trace(name: str) -> Trace:
    """Return a trace that comes with the package: a key of SHIPPED. Mooncake's ticks are smeared."""
    if name not in SHIPPED:
        raise TraceError(f"no trace {name!r}; expected one of {', '.join(SHIPPED)}")
    trace = read_trace(importlib.resources.files(__package__) / "traces" / SHIPPED[name])
    return trace.smeared(MOONCAKE_TICK_S, seed=0) if name == "mooncake" else trace


def read_trace(file: Traversable) -> Trace:
    """Read a trace; raise TraceError that names the file and the row for anything unexpected."""
    values: list[tuple[float, int, int]] = []
    for line, row in csv_rows(file, COLUMNS):
        values.append(_parse(row, f"{file.name}, line {line}"))
        if len(values) > 1 and values[-1][0] < values[-2][0]:
            raise TraceError(
                f"{file.name}, line {line}: negative gap, arrival {values[-1][0]} after {values[-2][0]}; "
                "expected rows in order of arrival"
            )
    if not values:
        raise TraceError(f"{file.name}: no rows; expected lines of {','.join(COLUMNS)}")
    arrival_s, inputs, outputs = zip(*values, strict=True)
    return Trace(
        file.name.removesuffix(".gz").removesuffix(".csv"),
        np.asarray(arrival_s, np.float64) - arrival_s[0],
        np.asarray(inputs, np.int64),
        np.asarray(outputs, np.int64),
    )


def csv_rows(file: Traversable, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file, plain or gzipped, with their lines; raise TraceError for other columns."""
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.name.endswith(".gz") else content).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{file.name}: cannot be read ({error}); expected CSV text, plain or gzipped") from None
    reader = csv.reader(io.StringIO(text))
    if (header := tuple(next(reader, ()))) != columns:
        raise TraceError(f"{file.name}, line 1: header {','.join(header)!r}; expected {','.join(columns)!r}")
    for row in reader:
        if row:
            yield reader.line_num, row


def _parse(row: list[str], where: str) -> tuple[float, int, int]:
    try:
        arrival_s, inputs, outputs = float(row[0]), int(row[1]), int(row[2])
        if len(row) != len(COLUMNS) or not math.isfinite(arrival_s) or arrival_s < 0 or inputs < 1 or outputs < 0:
            raise ValueError
    except (ValueError, IndexError):
        raise TraceError(
            f"{where}: {','.join(row)!r}; expected seconds, input tokens (at least 1), output tokens"
        ) from None
    return arrival_s, inputs, outputs
