"""What `faser doctor` makes of the graphs and draft rounds that the last engine announced in its HELLO (telemetry).

Called by controller/doctor/doctor.py. Reads one row and changes nothing; what is wrong with the file itself, the
check of the store says.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from ...engine_adapter.protocol import RAGGED
from ...engine_adapter.runner.v2_limits import LIMITS_V2
from ..telemetry.schema import connect_read_only
from .checks import Finding, Patient

_LAST = "SELECT hello FROM engines ORDER BY id DESC LIMIT 1"
_REMEDY = (
    "its log says why, after `replay no full CUDA graph`: cudagraph_mode FULL_AND_PIECEWISE with FlashAttention 3 or "
    "--attention-backend TRITON_ATTN, and no FASER_VARLEN_GRAPHS=0; else cudagraph_mode FULL where the backend can"
)

_ROUNDS = next(limit for limit in LIMITS_V2 if limit.name == "ragged drafting")


class _Announced(msgspec.Struct):
    """What is read of a HELLO, whatever its version."""

    runner: str
    k_max: int
    graph_sizes: list[int]
    graph_lengths: list[int] = []
    rounds: str = ""  # not told


def check_graphs(patient: Patient) -> Iterator[Finding]:
    hello = _last_hello(patient.config.store.path)
    if hello is None or hello.runner != "v2" or not hello.graph_sizes:
        return
    every, full = set(range(hello.k_max + 1)), set(hello.graph_lengths)
    if every <= full:
        yield Finding("CUDA graphs", "ok", "the last engine verifies every draft length in a full CUDA graph")
    else:
        lengths = ", ".join(map(str, sorted(full))) or "no length"
        seen = (
            f"the last engine has full CUDA graphs for {lengths} of the draft lengths 0 to {hello.k_max}, expected all"
        )
        yield Finding("CUDA graphs", "note", seen, _REMEDY)


def check_rounds(patient: Patient) -> Iterator[Finding]:
    hello = _last_hello(patient.config.store.path)
    if hello is None or hello.runner != "v2" or not (hello.k_max and hello.rounds):
        return
    if hello.rounds == RAGGED:
        yield Finding("draft rounds", "ok", "the last engine lets a request leave the draft batch after its own tokens")
    else:
        seen = "the last engine drafts the batch's longest length for every request, expected each its own"
        yield Finding("draft rounds", "note", seen, _ROUNDS.remedy)


def _last_hello(path: Path) -> _Announced | None:
    if not os.path.isfile(path):
        return None
    with suppress(sqlite3.Error, msgspec.MsgspecError), closing(connect_read_only(path)) as connection:
        for (text,) in connection.execute(_LAST):
            return msgspec.json.decode(text, type=_Announced)
    return None
