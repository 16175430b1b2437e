"""One telemetry file, opened once for all that is asked of it: engines, steps, request rows, draft lengths, figures.

Called by the demo, the report and calibration; may read while a sidecar writes, and sees the file as it was when the
first question was asked. Never writes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...engine_adapter.protocol import Hello, RequestRow
from ..errors import StoreError
from ..snapshot import AttainmentStatus, layers_by_rank
from .attained import attained
from .packing import StepCopies, step_copies, unpack_rows
from .schema import hello_of, open_for_reading
from .tables import CutSteps, DraftedLengths, StepTable, TelemetrySummary, summarise

_COLUMNS: Final = {column.name: np.int64 if column.type == "Ints" else np.float64 for column in fields(StepTable)}
_IN_ORDER: Final = "ORDER BY engine, counter, id"


@dataclass(frozen=True, slots=True)
class WholeTelemetry:
    """What a report tells of a file, all of one moment."""

    path: Path
    engines: list[Hello]
    steps: StepTable
    lengths: DraftedLengths
    summary: TelemetrySummary
    attainment: dict[str, AttainmentStatus]  # by class
    cuts: list[CutSteps]  # of engines whose stages can move


def read_whole(path: Path) -> WholeTelemetry:
    """Read a file once for all of its figures; raise StoreError if it is damaged, or none of ours."""
    with TelemetryFile(path) as file:
        steps, lengths = file.steps(), file.lengths()
        summary = summarise(steps, lengths)
        return WholeTelemetry(path, file.engines(), steps, lengths, summary, file.attained(), file.cuts())


class TelemetryFile:
    """A file being read; use it as a context. Each question raises StoreError where the file is damaged."""

    def __init__(self, path: Path) -> None:
        """Open the file; raise StoreError if it is none of ours."""
        self.path = path
        self._database = open_for_reading(path)

    def __enter__(self) -> TelemetryFile:
        with self._damage_told():
            self._database.execute("BEGIN")  # all answers are of one moment
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def engines(self) -> list[Hello]:
        """Return the engines as they introduced themselves, in order of their key."""
        with self._damage_told():
            rows = self._database.execute("SELECT hello FROM engines ORDER BY id").fetchall()
        return [hello_of(text, f" in {self.path}") for (text,) in rows]

    def steps(self) -> StepTable:
        """Return every step."""
        with self._damage_told():
            rows = self._database.execute(f"SELECT {', '.join(_COLUMNS)} FROM steps {_IN_ORDER}")
            columns = list(zip(*rows, strict=True)) or [()] * len(_COLUMNS)
        arrays: dict[str, npt.NDArray[np.generic]] = {
            name: np.asarray(column, kind) for (name, kind), column in zip(_COLUMNS.items(), columns, strict=True)
        }
        return StepTable(**arrays)  # type: ignore[arg-type]

    def request_rows(self) -> Iterator[list[RequestRow]]:
        """Yield the request rows of each step, in the order of `steps`."""
        with self._damage_told():
            for (blob,) in self._database.execute(f"SELECT rows FROM steps {_IN_ORDER}"):
                yield unpack_rows(blob)

    def copies(self) -> Iterator[StepCopies]:
        """Yield whose drafts were copied in each step, in the order of `steps`."""
        with self._damage_told():
            for (blob,) in self._database.execute(f"SELECT copies FROM steps {_IN_ORDER}"):
                yield step_copies(blob)

    def lengths(self) -> DraftedLengths:
        """Return the draft lengths of every decoding request in every step."""
        cells = [
            (index, row.draft_limit, row.drafted, row.handle in copies.drafted)
            for index, (rows, copies) in enumerate(zip(self.request_rows(), self.copies(), strict=True))
            for row in rows
            if row.emitted
        ]
        table = np.asarray(cells, np.int64).reshape(-1, 4)
        return DraftedLengths(table[:, 0], table[:, 1], table[:, 2], table[:, 3] != 0)

    def arrivals(self) -> dict[tuple[int, int], int]:
        """Return how many requests arrived before a step, by engine and counter; no entry: none."""
        query = """SELECT engine, counter, count(*) FROM events WHERE kind = 'arrival' AND counter IS NOT NULL
            GROUP BY 1, 2"""
        with self._damage_told():
            return {(engine, counter): number for engine, counter, number in self._database.execute(query)}

    def arrived_requests(self) -> int:
        """Return how many requests arrived within the file."""
        with self._damage_told():
            query = "SELECT count(*) FROM request_summary WHERE arrival_s IS NOT NULL"
            return int(self._database.execute(query).fetchone()[0])

    def finished_requests(self) -> list[tuple[Any, ...]]:
        """Return the requests that arrived and finished within the file, in order of arrival.

        Of each engine, handle, arrival_s, first_token_s, end_s, prompt_tokens and output_tokens, as they were written.
        """
        query = """
            SELECT engine, handle, arrival_s, first_token_s, end_s, prompt_tokens, output_tokens FROM request_summary
            WHERE arrival_s IS NOT NULL AND first_token_s IS NOT NULL AND end_kind = 'finish'
            ORDER BY arrival_s, handle"""
        with self._damage_told():
            return self._database.execute(query).fetchall()

    def attained(self) -> dict[str, AttainmentStatus]:
        """Return how many of the requests with objectives finished and were in time, by class."""
        with self._damage_told():
            return attained(self._database)

    def cuts(self) -> list[CutSteps]:
        """Return what each engine whose stages can move did under each cut, in the order in which these came.

        Steps of a pipeline overlap: one counts from the end of the step before, or from its own beginning if later.
        """
        query = """
            SELECT hello, stage_bounds, count(*), sum(is_moving), sum(emitted), sum(min(step_s, since_s)),
                max(stage_moves)
            FROM (SELECT *, time_s - lag(time_s, 1, time_s - step_s) OVER
                (PARTITION BY engine, run ORDER BY counter) AS since_s FROM steps) AS apart
            JOIN engines ON engines.id = apart.engine WHERE stage_bounds IS NOT NULL
            GROUP BY apart.engine, stage_bounds ORDER BY apart.engine, min(apart.id)"""
        with self._damage_told():
            rows = self._database.execute(query).fetchall()
        try:
            return [_cut(hello_of(text, f" in {self.path}"), *figures) for text, *figures in rows]
        except ValueError as error:
            raise StoreError(f"{self.path}, stage_bounds: {error}", "where a pipeline that can move is cut") from None

    @contextmanager
    def _damage_told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(
                f"{self.path} cannot be read: {error}", "a whole telemetry file", "the file may be cut"
            ) from None


def _cut(engine: Hello, bounds: str, steps: int, moving: int, tokens: int, seconds: float, moves: int) -> CutSteps:
    """Return a row of `cuts`; the last rank's end is told by HELLO alone."""
    if engine.stages is None:
        raise ValueError(f"{bounds!r} of an engine whose stages cannot move")
    layers = layers_by_rank(engine.stages, [int(bound) for bound in bounds.split(",") if bound])
    return CutSteps(tuple(layers), steps, moving, tokens, seconds, moves)
