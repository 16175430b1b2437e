"""What `faser doctor` makes of the CUDA graphs that the last engine announced: the telemetry file holds its HELLO.

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

from ..telemetry.schema import connect_read_only
from .checks import Finding, Patient

_LAST = "SELECT hello FROM engines ORDER BY id DESC LIMIT 1"
_REMEDY = (
    "its log says why, after `replay no full CUDA graph`: cudagraph_mode FULL_AND_PIECEWISE with FlashAttention 3 or "
    "--attention-backend TRITON_ATTN, and no FASER_VARLEN_GRAPHS=0; else cudagraph_mode FULL where the backend can"
)


class _Announced(msgspec.Struct):
    """What is read of a HELLO, whatever its version."""

    runner: str
    k_max: int
    graph_sizes: list[int]
    graph_lengths: list[int] = []


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


def _last_hello(path: Path) -> _Announced | None:
    if not os.path.isfile(path):
        return None
    with suppress(sqlite3.Error, msgspec.MsgspecError), closing(connect_read_only(path)) as connection:
        for (text,) in connection.execute(_LAST):
            return msgspec.json.decode(text, type=_Announced)
    return None
