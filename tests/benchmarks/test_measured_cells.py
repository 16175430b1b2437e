"""A benchmark that measures cell by cell goes on where it was stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def measured_cells(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("measured_cells")


def test_cells_that_are_done_are_kept_and_nothing_else_is_put_beside_them(
    measured_cells: ModuleType, tmp_path: Path
) -> None:
    path, settings = tmp_path / "cells.json", {"rounds": 2}
    report = measured_cells.begun(path, settings, {"cells": []})
    assert report == {"settings": settings, "cells": []}
    report["cells"].append({"batch": 4})
    measured_cells.write(path, report)
    assert measured_cells.begun(path, settings, {"cells": []})["cells"] == [{"batch": 4}]
    with pytest.raises(SystemExit, match=r"has settings \{'rounds': 2\}; expected \{'rounds': 3\}"):
        measured_cells.begun(path, {"rounds": 3}, {"cells": []})
    assert json.loads(path.read_text()) == report


def test_what_was_measured_before_a_failure_is_there_afterwards(
    measured_cells: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, settings = tmp_path / "cells.json", {"rounds": 2}
    measured_cells.write(path, {"settings": settings, "cells": [1]})
    with pytest.raises(TypeError):
        measured_cells.write(path, {"settings": settings, "cells": [1, object()]})
    assert measured_cells.begun(path, settings, {"cells": []})["cells"] == [1]
