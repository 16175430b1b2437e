"""FASER_* variables and the folder of sockets."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from faser.engine_adapter.settings import (
    SETTINGS,
    SettingError,
    core_numbers,
    default_endpoint,
    ensure_private_folder,
    load_settings,
    runtime_folder,
)


def test_an_empty_environment_gives_the_documented_defaults() -> None:
    settings = load_settings({})
    assert settings.is_enabled
    assert (settings.default_length, settings.lease_steps, settings.lease_ms) == (0, 32, 1000)
    assert settings.has_confidence
    assert settings.endpoint == default_endpoint({})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("FASER_DEFAULT_K", "three"),
        ("FASER_DEFAULT_K", "-1"),
        ("FASER_LEASE_MS", "0"),
        ("FASER_ENABLED", "yes"),
        ("FASER_CONFIDENCE", "true"),
        ("FASER_ENDPOINT", "udp://x"),
        ("FASER_ENDPOINT", "tcp://127.0.0.1:abc"),
        ("FASER_ENDPOINT", "tcp://127.0.0.1:0"),
        ("FASER_ENDPOINT", "tcp://127.0.0.1:65536"),
        ("FASER_ENDPOINT", "tcp://127.0.0.1"),
        ("FASER_ENDPOINT", "tcp://:5555"),
        ("FASER_ENDPOINT", "tcp://*:5555"),
        ("FASER_DRAFTER_CORES", "3-1"),
        ("FASER_DRAFTER_CORES", "1,,2"),
        ("FASER_DRAFTER_CORES", "-1"),
        ("FASER_DRAFTER_CORES", "0-99999999999999999999"),
        ("FASER_DRAFTER_CORES", "0-4096"),
        ("FASER_FRONTIER", "-1"),
        ("FASER_PING_PONG", "1"),
        ("FASER_ENDPOINT", "ipc://" + "x" * 200),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_variable(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=name) as caught:
        load_settings({name: text})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "tcp://[::1]:65535", "tcp://sidecar.example:1"])
def test_an_address_with_a_port_is_taken_as_it_is(address: str) -> None:
    assert load_settings({"FASER_ENDPOINT": address}).endpoint == address


def test_cores_are_named_by_numbers_and_ranges() -> None:
    assert core_numbers("1") == [1]
    assert core_numbers("6,2-3,3") == [2, 3, 6]
    assert load_settings({"FASER_DRAFTER_CORES": "all"}).drafter_cores == "all"


def test_the_runtime_folder_follows_the_environment() -> None:
    assert runtime_folder({"FASER_RUNTIME_DIR": "/a"}) == Path("/a")
    assert runtime_folder({"XDG_RUNTIME_DIR": "/run/u"}) == Path("/run/u/faser")


def test_without_a_temporary_folder_the_settings_are_read_and_only_the_socket_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a read-only root: the engine has to come to the line that switches FASER off."""
    for name in ("FASER_RUNTIME_DIR", "XDG_RUNTIME_DIR", "FASER_ENDPOINT", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    assert load_settings().endpoint == f"ipc:///tmp/faser-{os.getuid()}/engine.sock"
    with pytest.raises(SettingError, match=r"/proc/faser: .*; set FASER_RUNTIME_DIR to a folder you own"):
        ensure_private_folder(Path("/proc/faser"))
    with pytest.raises(SettingError, match=r"/proc/faser: .*; choose another"):
        ensure_private_folder(Path("/proc/faser"), "choose another")


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    ensure_private_folder(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(SettingError, match="0700"):
        ensure_private_folder(tmp_path / "open")


def test_every_setting_has_one_sentence_of_help() -> None:
    assert all(setting.help.endswith(".") and setting.name.startswith("FASER_") for setting in SETTINGS.values())
