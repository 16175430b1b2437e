"""What tests of the benchmarks' scripts share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import faser

FOLDER = Path(faser.__file__).parent / "benchmarks"


@pytest.fixture(scope="module")
def load_script() -> Iterator[Callable[[str], ModuleType]]:
    """Return what loads a script of benchmarks/ by name, as Python would: with the others beside it."""
    loaded = []

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look
        loaded.append(spec.name)
        spec.loader.exec_module(module)
        return module

    sys.path.insert(0, str(FOLDER))
    yield load
    sys.path.remove(str(FOLDER))
    for name in loaded:
        del sys.modules[name]
