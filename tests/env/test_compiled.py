"""Machine code is kept where only its user can write."""

from __future__ import annotations

from pathlib import Path

import pytest

from faser.env.compiled import compiled, is_private_cache


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
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    is_private = mode in (0o700, 0o755)
    assert is_private_cache() == is_private
    assert compiled(double)(2.0) == 4.0


def test_a_cache_that_is_not_there_yet_becomes_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "new"))
    assert is_private_cache()
