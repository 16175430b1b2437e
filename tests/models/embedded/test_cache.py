"""Cache folders: built once, whole or not at all, checked before use."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from faser.models.embedded import cache as cache_module
from faser.models.embedded.cache import STAMP, CacheError, FileCheck, cache_folder, ensure_folder, read_stamp, sha256_of

CONTENT = b"weights"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Writes one file and counts how often it was asked to."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.calls = 0
        self.content = content

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "model").write_bytes(self.content)


def expected() -> dict[str, FileCheck]:
    return {"model": FileCheck(7, hashlib.sha256(CONTENT).hexdigest())}


def touch(path: Path) -> None:
    """Give a file another time of change, also where the clock is coarse."""
    seen = path.stat()
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns + 10**9))


def damage(path: Path) -> None:
    """Change one byte, not the size."""
    path.write_bytes(path.read_bytes().replace(b"e", b"E", 1))
    touch(path)


def test_a_folder_is_built_once() -> None:
    build = Builder()
    first, second = ensure_folder("m", build), ensure_folder("m", build)
    assert (first, build.calls) == (second, 1)
    assert (first / "model").read_bytes() == CONTENT


@pytest.mark.parametrize("change", [b"weight", b""])
def test_a_file_of_another_size_is_rebuilt(change: bytes, caplog: pytest.LogCaptureFixture) -> None:
    build = Builder()
    folder = ensure_folder("m", build)
    (folder / "model").write_bytes(change)
    ensure_folder("m", build)
    assert (folder / "model").read_bytes() == CONTENT
    assert f"has {len(change)} bytes, expected 7" in caplog.text


@pytest.mark.parametrize("check", [None, expected()])
def test_a_changed_byte_is_found_because_the_file_was_changed_at_another_time(
    check: dict[str, FileCheck] | None, caplog: pytest.LogCaptureFixture
) -> None:
    build = Builder()
    folder = ensure_folder("m", build, check)
    damage(folder / "model")
    ensure_folder("m", build, check)
    assert (build.calls, (folder / "model").read_bytes()) == (2, CONTENT)
    (record,) = caplog.records
    assert "model cache is damaged and is rebuilt" in record.message
    assert "model has sha256" in record.message


def test_a_changed_byte_under_the_old_time_is_found_by_the_full_check_only() -> None:
    build = Builder()
    folder = ensure_folder("m", build)
    seen = (folder / "model").stat()
    (folder / "model").write_bytes(b"wEights")
    os.utime(folder / "model", ns=(seen.st_atime_ns, seen.st_mtime_ns))
    ensure_folder("m", build)
    assert build.calls == 1
    ensure_folder("m", build, full=True)
    assert build.calls == 2


@pytest.mark.parametrize("check", [None, expected()])
def test_contents_are_read_once_after_a_change_of_time_and_not_again(
    check: dict[str, FileCheck] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Builder()
    folder = ensure_folder("m", build, check)
    read: list[Path] = []
    monkeypatch.setattr(cache_module, "sha256_of", lambda path, *_: read.append(path) or sha256_of(path))
    ensure_folder("m", build, check)
    assert read == []
    touch(folder / "model")
    for _ in range(3):
        ensure_folder("m", build, check)
    assert (read, build.calls) == ([folder / "model"], 1)


def test_a_stamp_without_times_is_believed_after_the_contents_were_read() -> None:
    """What versions before wrote; a damaged file beside such a stamp is found."""
    build = Builder()
    folder = ensure_folder("m", build)
    for content, calls in ((CONTENT, 1), (b"wEights", 2)):
        (folder / STAMP).write_text(json.dumps({"model": [7, hashlib.sha256(CONTENT).hexdigest()]}))
        (folder / "model").write_bytes(content)
        ensure_folder("m", build)
        assert build.calls == calls
        assert (read_stamp(folder) or {})["model"].mtime_ns == (folder / "model").stat().st_mtime_ns


def test_a_cache_that_cannot_be_written_is_read_again_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    folder = ensure_folder("m", build)
    touch(folder / "model")

    def refuse(path: Path, text: str) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert ensure_folder("m", build) == ensure_folder("m", build) == folder
    assert build.calls == 1


def test_a_file_that_cannot_be_read_is_rebuilt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build = Builder()
    folder = ensure_folder("m", build)
    touch(folder / "model")
    broken = iter([True, True])

    def read(path: Path, *_: object) -> str:
        if next(broken, False):
            raise OSError(5, "Input/output error")
        return sha256_of(path)

    monkeypatch.setattr(cache_module, "sha256_of", read)
    ensure_folder("m", build)
    assert build.calls == 2
    assert "model cannot be read: Input/output error" in caplog.text


def test_a_missing_stamp_leads_to_the_full_check() -> None:
    build = Builder()
    check = expected()
    folder = ensure_folder("m", build, check)
    (folder / STAMP).unlink()
    ensure_folder("m", build, check)
    assert (build.calls, (folder / STAMP).is_file()) == (1, True)
    (folder / STAMP).unlink()
    damage(folder / "model")
    ensure_folder("m", build, check)
    assert (build.calls, (folder / "model").read_bytes()) == (2, CONTENT)


def test_a_stamp_that_cannot_be_read_leads_to_a_rebuild() -> None:
    build = Builder()
    folder = ensure_folder("m", build)
    (folder / STAMP).write_text("[1, 2")
    ensure_folder("m", build)
    assert build.calls == 2


def test_a_build_that_gives_something_else_is_refused_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(CacheError, match=r"constraints\.txt"):
        ensure_folder("m", Builder(b"other"), expected())
    assert [path.name for path in cache.iterdir()] == [".m.lock"]


def test_a_build_that_fails_leaves_nothing(cache: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_folder("m", build)
    assert [path.name for path in cache.iterdir()] == [".m.lock"]


def test_a_full_disk_is_one_clear_line() -> None:
    def build(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CacheError, match=r"cannot write .*No space left on device; free some space .* FASER_CACHE"):
        ensure_folder("m", build)


def test_a_cache_that_cannot_be_made_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASER_CACHE", "/dev/null/cache")
    with pytest.raises(CacheError, match=r"cannot use the model cache /dev/null/cache: .*FASER_CACHE"):
        ensure_folder("m", Builder())


RACER = """
import sys, time
from pathlib import Path
from faser.models.embedded.cache import ensure_folder
def build(folder):
    print("built", flush=True)
    time.sleep(0.3)
    (folder / "model").write_bytes(b"weights")
sys.stdin.readline()
folder = ensure_folder("m", build, progress=lambda what, share: print(what, flush=True))
assert (folder / "model").read_bytes() == b"weights"
"""


def test_a_home_that_does_not_exist_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASER_CACHE", "~nobody-at-all/cache")
    with pytest.raises(CacheError, match=r"FASER_CACHE='~nobody-at-all/cache'.*set it to a writable folder"):
        ensure_folder("m", Builder())


def test_of_several_processes_one_builds_and_the_others_wait() -> None:
    racers = [
        subprocess.Popen([sys.executable, "-P", "-c", RACER], stdin=-1, stdout=-1, cwd="/", text=True) for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [racer.communicate(timeout=60)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert "".join(said).count("built") == 1


def test_the_stamp_names_size_sha256_and_time_of_change() -> None:
    folder = ensure_folder("m", Builder())
    stamp = json.loads((folder / STAMP).read_text())
    model = folder / "model"
    assert stamp == {"model": [7, sha256_of(model), model.stat().st_mtime_ns]}


def test_without_a_home_the_cache_says_which_variable_moves_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "FASER_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CacheError, match=r"^no home folder for the model cache; set FASER_CACHE to a writable folder$"):
        cache_folder()
    monkeypatch.setenv("FASER_CACHE", "~/models")
    with pytest.raises(CacheError, match=r"^FASER_CACHE='~/models': no such user's home; set it to"):
        cache_folder()
    monkeypatch.setenv("FASER_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


def test_a_cache_that_this_user_cannot_enter_is_refused_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """As below a HOME that is still root's."""

    def closed(path: object, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", closed)
    monkeypatch.setattr(os, "mkdir", closed)
    with pytest.raises(CacheError, match=r"cannot use the model cache .*: Permission denied; set FASER_CACHE"):
        ensure_folder("model", Builder())
