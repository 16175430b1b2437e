"""What tests of the benchmarks' scripts share."""

from __future__ import annotations

import importlib
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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Return what imports a module of benchmarks/gpu; all are forgotten again, for their names are short."""
    folder = FOLDER / "gpu"
    names = [module.stem for module in folder.glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
