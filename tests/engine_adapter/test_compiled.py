"""Machine code is kept where only its user can write."""

from __future__ import annotations

from pathlib import Path

import pytest

from faser.engine_adapter.compiled import CACHE_VARIABLE, compiled, is_private


def double(value: float) -> float:
    return 2.0 * value


def test_what_cannot_be_cached_is_compiled_all_the_same() -> None:
    scope: dict[str, object] = {}
    exec("def triple(value):\n    return 3.0 * value\n", scope)  # numba finds no file to keep it beside
    triple = compiled(scope["triple"])  # type: ignore[type-var]
    assert triple(2.0) == 6.0  # type: ignore[operator]


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o720, 0o777])
def test_a_cache_that_others_can_write_is_not_used(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(mode)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert is_private(str(tmp_path)) == (mode in (0o700, 0o755))
    assert compiled(double)(2.0) == 4.0


def test_a_cache_that_is_not_there_yet_becomes_ours(tmp_path: Path) -> None:
    assert is_private(str(tmp_path / "new"))
    assert is_private("")  # beside the source, or in the user's own
