"""Machine code is kept where only its user can write."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from faser.engine_adapter.compiled import CACHE_VARIABLE, compiled, is_kept, is_private


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


def test_a_cache_that_is_closed_to_us_is_not_ours(tmp_path: Path) -> None:
    assert not is_private("/dev/null/cache")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a file of a package that cannot be written, for a user without a home."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    package, allowed = tmp_path / "package", os.access
    package.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != package and allowed(path, mode))
    return str(package / "loops.py")


def test_without_a_home_machine_code_is_kept_only_where_a_folder_is_named(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_kept(source)
    assert is_kept(source, {CACHE_VARIABLE: str(tmp_path / "new")})
    assert is_kept(source, {"XDG_CACHE_HOME": str(tmp_path)})
    assert not is_kept(source, {"XDG_CACHE_HOME": "relative"})
    assert not is_kept(source, {CACHE_VARIABLE: "/dev/null/cache"})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert is_kept(source)
    assert is_kept(str(tmp_path / "beside.py"), {})


def test_without_a_home_no_machine_code_is_read_from_the_current_folder(tmp_path: Path) -> None:
    """numba's own default would be a folder named ~ there, which others may have filled."""
    unshare = ["unshare", "-U", "--map-user=12345", "--map-group=12345"]
    try:
        tried = subprocess.run([*unshare, "true"], capture_output=True, text=True, timeout=30)
    except OSError as error:
        pytest.skip(f"no user namespaces here: {error}")
    if tried.returncode:
        pytest.skip(f"no user namespaces here: {tried.stderr.strip()}")
    package, here = tmp_path / "package", tmp_path / "here"
    package.mkdir()
    here.mkdir()
    (package / "loops.py").write_text(
        "from faser.engine_adapter.compiled import compiled, kept\n\n"
        "@compiled\ndef double(x):\n    return 2.0 * x\n\n"
        "@kept\ndef triple(x):\n    return 3.0 * x\n"
    )
    package.chmod(0o500)
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH", ""))))
    code = "import loops; print(loops.double(2.0), loops.triple(2.0))"
    done = subprocess.run(
        [*unshare, sys.executable, "-P", "-c", code], env=kept | {"PYTHONPATH": path}, cwd=here, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    package.chmod(0o700)
    assert (done.stdout, done.stderr) == ("4.0 6.0\n", "")
    assert list(here.iterdir()) == []
