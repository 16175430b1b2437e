"""Accept lengths of published runs, as drafts that the acceptance generator can be fitted to.

Called by `faser calibrate --acceptance`, docs and tests. JSON lines; a bad row is named by file and line, never
skipped.
"""

from __future__ import annotations

import importlib.resources
from importlib.resources.abc import Traversable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ..workload.request_trace import TraceError
from .acceptance_fit import DraftTrial

SHIPPED: Final = (
    "spec_bench__eagle", "mt_bench__medusa", "query_product_rank__eagle", "query_product_rank__hydra",
    "multiclass_product_classification__eagle", "multiclass_product_classification__hydra",
    "sentiment_analysis__eagle", "sentiment_analysis__hydra",
)  # fmt: skip


class AcceptedRun(msgspec.Struct, frozen=True):
    """One request: tokens that each step emitted, the target's own included. Other fields are ignored."""

    accept_lengths: Annotated[list[Annotated[int, Meta(ge=1, le=65)]], Meta(min_length=1)]


def shipped_accept_trace(name: str) -> list[DraftTrial]:
    """Return a trace that comes with the package: one of SHIPPED."""
    if name not in SHIPPED:
        raise TraceError(f"no accept trace {name!r}; expected one of {', '.join(SHIPPED)}")
    return read_accept_trace(importlib.resources.files(__package__) / "accept" / f"{name}.jsonl")


def read_accept_trace(file: Traversable) -> list[DraftTrial]:
    """Read a trace; every draft counts as long as the longest accepted one of the file."""
    decoder = msgspec.json.Decoder(AcceptedRun)
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise TraceError(f"{file.name}: cannot be read ({error}); expected JSON lines") from None
    runs = []
    for number, line in enumerate(lines, start=1):
        try:
            runs.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(f"{file.name}, line {number}: {error}; expected accept_lengths of at least 1") from None
    if not runs:
        raise TraceError(f"{file.name}: no rows; expected one request per line")
    depth = max(max(run.accept_lengths) for run in runs) - 1
    return [
        DraftTrial((0, request), depth, depth, length - 1)
        for request, run in enumerate(runs)
        for length in run.accept_lengths
    ]
