"""A digest of a module's source and of every source of ours that it imports: the key of a cache of machine code.

Called by the simulator's kernel while it is imported. Numba watches only the file of the function it compiles.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path


def digest_of(module: Path) -> str:
    """Return a hexadecimal digest of the module's file and of all that it imports relatively, directly or not."""
    digest = hashlib.sha256()
    for path in sorted(imported_sources(module)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def imported_sources(module: Path) -> set[Path]:
    """Return the module's own file and those of the modules of this package that it needs."""
    found: set[Path] = set()
    waiting = [module.resolve()]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _imports(path)
    return found


def _imports(path: Path) -> Iterator[Path]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            named = [folder / f"{alias.name}.py" for alias in node.names]
            yield from (file for file in (folder.with_suffix(".py"), *named) if file.is_file())
