"""Configuration: file < environment < flags, and one clear line for what cannot be used."""

import re
from pathlib import Path

import pytest

from faser.controller.config import Config, settings
from faser.controller.config_layers import load
from faser.controller.errors import ConfigError


@pytest.fixture(autouse=True)
def no_user_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nobody"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "faser.toml"
    path.write_text("[policy]\nspec = 'off'\n[lease]\nsteps = 8\nms = 200\n[store]\npath = '/data/t.sqlite'\n")
    return path


def test_flags_win_over_the_environment_and_that_over_the_file(file: Path) -> None:
    effective = load(file, {"FASER_LEASE_STEPS": "9", "FASER_LEASE_MS": "300"}, {"lease.ms": 400, "store.path": None})
    config = effective.config
    assert (config.policy.spec, config.lease.steps, config.lease.ms) == ("off", 9, 400)
    assert config.store.path == Path("/data/t.sqlite")
    origins = [effective.origins[key] for key in ("policy.spec", "lease.steps", "lease.ms", "log.level")]
    assert origins == [f"file {file}", "environment FASER_LEASE_STEPS", "flag", "default"]


def test_defaults_are_complete_and_the_endpoint_is_the_engines() -> None:
    config = load(environment={"FASER_RUNTIME_DIR": "/run/user/7/faser"}).config
    assert config.link.endpoint == "ipc:///run/user/7/faser/engine.sock"
    assert config.lease == Config().lease


def test_the_environment_may_name_the_file(file: Path) -> None:
    assert load(environment={"FASER_CONFIG": str(file)}).config.policy.spec == "off"


def test_the_engines_own_variables_and_those_of_kubernetes_are_no_mistakes() -> None:
    environment = {
        "FASER_DEFAULT_K": "2",
        "FASER_CACHE": "/c",
        "FASER_SERVICE_HOST": "10.0.0.1",
        "FASER_PORT": "tcp://x",
    }
    assert load(environment=environment).config.policy == Config().policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[polcy]\nspec = 'off'", r"unknown part \[polcy\] in .*expected a name such as policy"),
        ("[policy]\nspek = 'off'", r"unknown key policy\.spek in .*expected a name such as policy\.spec"),
        ("policy = 3", r"policy = 3 in .*expected a table \[policy\]"),
        ("[lease]\nsteps = 'x'", r"lease\.steps = 'x' from .*expected a value of type int"),
        ("[lease]\nsteps = true", r"lease\.steps = True from .*expected a value of type int"),
        ("[lease]\nsteps = 0", r"lease\.steps = 0 from .*expected a number from 1 to 100000"),
        ("[store]\nflush_s = nan", r"store\.flush_s = nan from .*expected a number"),
        ("[log]\nlevel = 'loud'", r"log\.level = 'loud'; expected debug, info, warning or error"),
        ("[policy", r"is not TOML"),
        ("\udcff", r"is not TOML"),
    ],
)
def test_a_bad_file_is_one_line_that_says_what_was_expected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"FASER_POLCY": "off"}, "unknown environment variable FASER_POLCY; expected a name such as FASER_POLICY"),
        (
            {"FASER_STORE_ENABLED": "maybe"},
            "store.enabled = 'maybe' from FASER_STORE_ENABLED; expected a value of type bool",
        ),
        ({"FASER_LEASE_MS": "1.5"}, "lease.ms = '1.5' from FASER_LEASE_MS; expected a value of type int"),
        ({"FASER_CONFIG": "/nowhere.toml"}, "no configuration file /nowhere.toml"),
    ],
)
def test_a_bad_environment_is_one_line_that_names_the_variable(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(environment=environment)


def test_every_setting_has_help_and_a_variable_of_its_own() -> None:
    described = settings().values()
    assert all(setting.help for setting in described)
    assert len({setting.variable for setting in described}) == len(described)
    assert all(setting.variable.startswith("FASER_") for setting in described)
