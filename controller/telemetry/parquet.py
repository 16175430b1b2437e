"""Lines of an export as a Parquet file, with the types that its columns have. Needs the extra `parquet`.

Called by the export, which imports this module only when it is asked for such a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Final

import pyarrow
from pyarrow.parquet import ParquetWriter

from ..errors import StoreError

GROUP_ROWS: Final = 16_384  # held in memory at a time
TYPES: Final = {
    "int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string(), "bool": pyarrow.bool_(),
    "floats": pyarrow.list_(pyarrow.float64()),
}  # fmt: skip


def write_parquet(path: Path, kinds: Mapping[str, str], content: Iterable[Mapping[str, object]]) -> None:
    """Write every line; raise StoreError where one holds what its column cannot."""
    schema = pyarrow.schema([(name, TYPES[kind]) for name, kind in kinds.items()])
    left, number = iter(content), 0
    with path.open("wb") as stream, ParquetWriter(stream, schema, compression="zstd") as writer:
        while group := list(islice(left, GROUP_ROWS)):
            try:
                table = pyarrow.Table.from_pylist(group, schema)
            except (pyarrow.ArrowException, OverflowError) as error:
                raise StoreError(
                    f"lines {number + 1} to {number + len(group)} cannot be written as Parquet: {error}",
                    "numbers and text as docs/reference/telemetry.md says",
                    "faser store check names what is damaged",
                ) from None
            writer.write_table(table)
            number += len(group)
