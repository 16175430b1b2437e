"""Messages from engines, decoded without a Python object for each request of a step.

Called by the daemon's link. Making those objects, and taking them apart again, was a fifth of the sidecar's time.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ...engine_adapter.protocol import FromEngine, Goodbye, Hello, StepRecord, decode_from_engine, decode_with
from .step_rows import StepRows


def _fields() -> list[Any]:
    """Return the fields of StepRecord, with the rows left as they came."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(StepRecord):
        kind = msgspec.Raw if field.name == "rows" else field.type
        fields.append((field.name, kind) if field.required else (field.name, kind, field.default))
    return fields


_Step: Final[Any] = msgspec.defstruct("_Step", _fields(), array_like=True, tag="step", gc=False)
_decoder: Final = msgspec.msgpack.Decoder(Hello | _Step | Goodbye)


def decode(frame: bytes) -> FromEngine:
    """Return the message an engine sent, a record's rows as StepRows; raise ProtocolError for anything else."""
    message: Any = decode_with(_decoder, frame)
    if type(message) is not _Step:
        return message  # type: ignore[no-any-return]
    if (rows := StepRows.read(message.rows)) is None:
        record = decode_from_engine(frame)  # says what is wrong; and rows may be written in other ways than msgspec's
        assert isinstance(record, StepRecord)
        record.rows = StepRows.of(record.rows)
        return record
    message.rows = rows
    return StepRecord(*msgspec.structs.astuple(message))
