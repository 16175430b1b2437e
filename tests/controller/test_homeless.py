"""A user without a home, a place without a writable folder, a deleted current folder: one line, or none needed.

As Kubernetes' runAsUser gives it: a number that passwd does not know, no HOME. In a user namespace where the machine
has them; always in a process in which passwd knows nobody.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import faser
from faser.controller.config import require_files
from faser.controller.config_layers import as_json, as_toml, load
from faser.controller.doctor.checks import Patient
from faser.controller.doctor.doctor import examine
from faser.controller.doctor.installation import Installation
from faser.controller.engine.sidecar_child import sidecar_environment, start_sidecar
from faser.controller.errors import ConfigError
from faser.controller.home import config_file

UNSHARE = ("unshare", "-U", "--map-user=12345", "--map-group=12345")
# A mount namespace in which nothing but a fresh /srv can be written, then a user namespace without privileges.
READ_ONLY = (
    "unshare", "-Urm", "bash", "-c",
    "while read -r _ place _; do case $place in /proc*|/sys*|/dev*) ;; "
    "*) mount -o remount,bind,ro $place 2>/dev/null ;; esac; done </proc/mounts\n"
    f"if [ -w /tmp ] || [ -w {Path(faser.__file__).parent} ]; then echo still writable >&2; exit 1; fi\n"
    f'mount -t tmpfs tmpfs /srv && cd / && exec {" ".join(UNSHARE)} "$@"', "bash",
)  # fmt: skip
CLI = "from faser.controller.cli.main import main; main()"
NOBODY = "import pwd\ndef unknown(uid): raise KeyError(uid)\npwd.getpwuid = unknown\n" + CLI
NO_TEMPORARY = "import tempfile\ntempfile._candidate_tempdir_list = lambda: []\n" + NOBODY

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def bare(**variables: str) -> dict[str, str]:
    """Return an environment without HOME and without settings, in which this interpreter finds its packages."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {"COLUMNS": "250"} | variables


def run(prefix: tuple[str, ...], code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-P", "-c", code, *arguments]
    return subprocess.run(command, env=bare(**variables), cwd="/", capture_output=True, text=True, timeout=120)


@cache
def refusal(prefix: tuple[str, ...]) -> str:
    """Return why this machine cannot run something so, empty if it can."""
    try:
        tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=30)
    except OSError as error:
        return str(error)
    return (tried.stderr.strip() or "refused") if tried.returncode else ""


def require(prefix: tuple[str, ...]) -> None:
    if reason := refusal(prefix):
        pytest.skip(f"no such namespace here: {reason}")


def named(value: object) -> str | None:
    return " ".join(value) if isinstance(value, tuple) else None


@pytest.fixture(params=["namespace", "process"])
def homeless(request: pytest.FixtureRequest, sockets: Path) -> Run:
    """Return a function that runs `faser` for a user without a home."""
    is_process = request.param == "process"
    if not is_process:
        require(UNSHARE)

    def homeless_run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        prefix, code = ((), NOBODY) if is_process else (UNSHARE, CLI)
        return run(prefix, code, *arguments, **{"FASER_RUNTIME_DIR": str(sockets)} | variables)

    return homeless_run


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the home away, in this process."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "FASER_CACHE"):
        monkeypatch.delenv(name, raising=False)


COMMANDS = {
    ("--help",): 0,
    ("config",): 0,
    ("config", "--json"): 0,
    ("status",): 3,
    ("mode", "off"): 3,
    ("top",): 3,
    ("policy", "list"): 0,
    ("evaluate", "--help"): 0,
    ("store", "export", "/nowhere.sqlite"): 4,
    ("store", "check", "/nowhere.sqlite"): 4,
    ("replay", "/nowhere.sqlite"): 4,
}


@pytest.mark.parametrize(("arguments", "code"), COMMANDS.items(), ids=named)
def test_what_needs_no_home_works_without_one(homeless: Run, arguments: tuple[str, ...], code: int) -> None:
    result = homeless(*arguments)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == (code != 0)


@pytest.mark.parametrize(
    ("arguments", "variables", "told"),
    [
        (("sidecar",), {}, "no home folder for modes.json and telemetry.sqlite; expected a user with a home; "
         "set FASER_MODE_STATE and FASER_STORE, or HOME"),
        (("sidecar", "--no-record"), {}, "no home folder for modes.json; expected a user with a home; "
         "set FASER_MODE_STATE, or HOME"),
        (("sidecar",), {"FASER_MODE_STATE": "/tmp/m.json"}, "no home folder for telemetry.sqlite; expected a user with "
         "a home; set FASER_STORE, or HOME"),
        (("sidecar",), {"FASER_STORE": "~/t.sqlite"}, "store.path = '~/t.sqlite' from FASER_STORE; expected a user "
         "with a home folder after ~"),
    ],
)  # fmt: skip
def test_a_sidecar_says_which_variables_to_set(
    homeless: Run, arguments: tuple[str, ...], variables: dict[str, str], told: str
) -> None:
    result = homeless(*arguments, **variables)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"faser: {told}\n")


def test_what_serves_a_model_says_where_to_keep_it(homeless: Run, tmp_path: Path) -> None:
    """Whichever vLLM is installed: it is said to be one that FASER knows."""
    told = tmp_path / "vllm-0.32.0.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    result = homeless("serve", "embedded", PYTHONPATH=path)
    assert result.returncode == 6
    assert result.stderr == "faser: no home folder for the model cache; set FASER_CACHE to a writable folder\n"


def test_the_doctor_names_each_place_and_its_variable(homeless: Run) -> None:
    result = homeless("doctor", "--json")
    troubles = {found["name"]: found for found in json.loads(result.stdout) if found["level"] == "fail"}
    assert {"model cache", "store", "modes"} <= set(troubles), result.stderr
    assert "FASER_CACHE" in troubles["model cache"]["remedy"]
    assert troubles["store"]["remedy"] == "set FASER_STORE, or HOME"
    assert troubles["modes"]["remedy"] == "set FASER_MODE_STATE, or HOME"
    assert "could not be checked" not in result.stdout


def test_a_sidecar_with_every_path_set_serves_without_a_home(sockets: Path) -> None:
    require(UNSHARE)
    paths = {
        "FASER_RUNTIME_DIR": str(sockets), "FASER_STORE": f"{sockets}/t.sqlite",
        "FASER_MODE_STATE": f"{sockets}/modes.json", "FASER_POLICY": "fixed:3",
    }  # fmt: skip
    command = [*UNSHARE, sys.executable, "-P", "-c", CLI, "sidecar"]
    with subprocess.Popen(command, env=bare(**paths), cwd="/", stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        said = next(line for line in running.stderr if "sidecar listens" in line or "faser:" in line)
        assert "sidecar listens" in said
        ordered = run(UNSHARE, CLI, "mode", "off", **paths)
        running.send_signal(signal.SIGTERM)
        _, rest = running.communicate(timeout=60)
    assert (ordered.returncode, ordered.stdout.splitlines()[0]) == (0, "off: switched for every engine")
    assert running.returncode == 0, rest
    assert "faser mode, uid 12345" in rest, "who ordered it has a number only"
    assert (sockets / "t.sqlite").exists()
    assert run(UNSHARE, CLI, "store", "check", f"{sockets}/t.sqlite").returncode == 0


def test_a_configuration_without_a_home_is_printed_and_can_be_read_again(nobody: None, tmp_path: Path) -> None:
    effective = load()
    text = as_toml(effective)
    assert (
        '# path = "~/.local/state/faser/telemetry.sqlite"  # default, but there is no home folder; FASER_STORE:' in text
    )
    assert "path" not in tomllib.loads(text)["store"]
    assert json.loads(as_json(effective))["mode.state"] is None
    (tmp_path / "again.toml").write_text(text)
    assert load(tmp_path / "again.toml").config == effective.config


def test_a_default_is_where_the_user_is_when_it_is_asked_for(
    nobody: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert load().config.store.path == tmp_path / "state" / "faser" / "telemetry.sqlite"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load().config.mode.state == tmp_path / ".local" / "state" / "faser" / "modes.json"
    assert config_file() == tmp_path / ".config" / "faser" / "config.toml"


@pytest.mark.parametrize("home", ["/dev/null", "", "no/absolute/path"])
def test_a_home_that_nobody_can_enter_is_none(nobody: None, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    assert config_file() is None
    with pytest.raises(ConfigError, match=r"no home folder for modes\.json and telemetry\.sqlite"):
        require_files(load().config)


def test_a_home_that_is_still_roots_is_none(sockets: Path) -> None:
    require(UNSHARE)
    closed = sockets / "root"
    closed.mkdir(mode=0o000)
    result = run(UNSHARE, CLI, "config", HOME=str(closed), FASER_RUNTIME_DIR=str(sockets))
    assert (result.returncode, result.stderr) == (0, "")
    assert "but there is no home folder" in result.stdout
    named = run(UNSHARE, CLI, "config", XDG_CONFIG_HOME=str(closed), FASER_RUNTIME_DIR=str(sockets))
    assert (named.returncode, named.stderr.count("\n")) == (2, 1)
    assert "cannot be read: Permission denied; check its permissions or set FASER_CONFIG" in named.stderr


def test_a_sidecar_that_keeps_no_telemetry_needs_no_place_for_it(nobody: None, tmp_path: Path, sockets: Path) -> None:
    flags = {"store.enabled": False, "mode.state": tmp_path / "modes.json", "link.endpoint": f"ipc://{sockets}/e.sock"}
    config = load(flags=flags).config
    require_files(config)
    handed_on = sidecar_environment(config)
    assert "FASER_STORE" not in handed_on
    assert handed_on["FASER_MODE_STATE"] == str(tmp_path / "modes.json")
    assert load(environment=handed_on).config == config


def test_serve_says_so_before_it_starts_a_sidecar(nobody: None, sockets: Path) -> None:
    config = load(flags={"link.endpoint": f"ipc://{sockets}/engine.sock"}).config
    with pytest.raises(ConfigError, match="set FASER_MODE_STATE and FASER_STORE"):
        start_sidecar(config, sockets / "sidecar.log")
    assert not (sockets / "sidecar.log").exists()


def test_without_a_temporary_folder_only_what_makes_something_in_it_says_so(sockets: Path) -> None:
    shown = run((), NO_TEMPORARY, "config")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f'endpoint = "ipc:///tmp/faser-{os.getuid()}/engine.sock"' in shown.stdout
    asked = run((), NO_TEMPORARY, "status")
    assert (asked.returncode, asked.stderr.count("\n")) == (3, 1)
    drawn = run((), NO_TEMPORARY, "profile", "embedded", "--output", f"{sockets}/profile.json")
    assert "Traceback" not in drawn.stderr
    assert drawn.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--help",), 0, ""),
        (("config",), 0, ""),
        (("status",), 3, "no sidecar runs at"),
        (("sidecar", "--store", "/srv/t.sqlite"), 3, "/tmp/faser-12345: Read-only file system; set FASER_RUNTIME_DIR"),
        (("keys", "new", "/etc/faser-keys"), 2, "/etc/faser-keys: Read-only file system; choose a folder of yours"),
        (("store", "export", "/nowhere.sqlite"), 4, "no telemetry file /nowhere.sqlite"),
        (("policy", "list"), 0, ""),
    ],
    ids=named,
)
def test_where_nothing_can_be_written_it_is_one_line_that_says_what_to_set(
    arguments: tuple[str, ...], code: int, told: str
) -> None:
    require(READ_ONLY)
    variables = {"FASER_MODE_STATE": "/srv/modes.json", "FASER_POLICY": "fixed:3", "FASER_LOG": "error"}
    result = run(READ_ONLY, CLI, *arguments, **variables)
    assert (result.returncode, result.stderr.count("\n")) == (code, int(code != 0)), result.stderr
    assert told in result.stderr


def test_the_doctor_looks_at_a_place_where_nothing_can_be_written() -> None:
    require(READ_ONLY)
    result = run(READ_ONLY, CLI, "doctor", "--json")
    found = {each["name"]: each for each in json.loads(result.stdout)}
    assert "could not be checked" not in result.stdout
    assert found["runtime folder"]["remedy"] == "set FASER_RUNTIME_DIR to a folder you own"
    assert found["estimates"]["remedy"] == "set NUMBA_CACHE_DIR to a folder you own"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--help",), 0, ""),
        (("config",), 0, ""),
        (("policy", "list"), 0, ""),
        (("status",), 3, "faser: no sidecar runs at"),
        (("store", "check", "t.sqlite"), 4, "faser: no telemetry file t.sqlite"),
        (("replay", "t.sqlite"), 4, "faser: no telemetry file t.sqlite"),
        (("bench",), 1, "faser: the folder this runs in was deleted; change to one that is there"),
        (("sidecar", "--store", "t.sqlite"), 4, "faser: t.sqlite cannot be written: No such file"),
        (("keys", "new", "mine"), 2, "faser: mine: No such file or directory; choose a folder of yours"),
    ],
    ids=named,
)
def test_a_deleted_folder_around_it_is_one_line_at_most(
    arguments: tuple[str, ...], code: int, told: str, sockets: Path, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    prefix = ("sh", "-c", f'cd {gone} && rmdir {gone} && exec "$@"', "sh")
    variables = {"HOME": str(tmp_path), "FASER_POLICY": "fixed:3", "FASER_RUNTIME_DIR": str(sockets)}
    result = run(prefix, CLI, *arguments, **variables)
    lines = [line for line in result.stderr.splitlines() if ".warm_up" not in line]  # said where it is slow
    assert (result.returncode, len(lines)) == (code, int(code != 0)), result.stderr
    assert told in result.stderr


def test_the_doctor_in_this_process_reaches_its_last_check(
    nobody: None, monkeypatch: pytest.MonkeyPatch, sockets: Path
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", _no_temporary_folder)
    config = load(flags={"link.endpoint": f"ipc://{sockets}/engine.sock"}).config
    found = examine(Patient(Installation.found(), config))
    assert [each.name for each in found if "could not be checked" in each.seen] == []
    assert found[-1].name == "lease"


def _no_temporary_folder() -> str:
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")
