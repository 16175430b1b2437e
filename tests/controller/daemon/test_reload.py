"""SIGHUP: a changed configuration is taken whole or not at all, while engines are steered."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from faser.controller.config import Config, ObjectivesConfig, PolicyConfig, settings
from faser.controller.config_layers import load
from faser.controller.daemon.daemon import Daemon
from faser.controller.daemon.reload import FIXED, prepare
from faser.controller.errors import ConfigError
from faser.controller.link.ask import ask
from faser.engine_adapter.protocol import RequestEvent
from faser.models.policies.policy import PolicyError

CHANGES: dict[type, Callable[[Any], Any]] = {
    bool: lambda value: not value,
    int: lambda value: value + 1,
    float: lambda value: value + 0.5,
    str: lambda value: f"{value}x",
    Path: lambda value: value / "x",
}


@pytest.mark.parametrize("key", sorted(FIXED))
def test_what_is_opened_once_needs_a_restart(config: Config, key: str) -> None:
    assert key in settings()
    part, name = key.split(".")
    before = getattr(config, part)
    value = CHANGES[settings()[key].type](getattr(before, name))
    changed = dataclasses.replace(config, **{part: dataclasses.replace(before, **{name: value})})
    with pytest.raises(ConfigError, match=rf"{key} changed; expected .*; restart the sidecar"):
        prepare(config, changed, {})


def test_an_unchanged_configuration_prepares_to_nothing(config: Config) -> None:
    assert prepare(config, config, {}).changed == ()


def test_a_policy_that_one_engine_cannot_have_rejects_everything(
    start_daemon: Any, make_engine: Any, config: Config
) -> None:
    daemon: Daemon = start_daemon().daemon
    engine = make_engine()
    engine.hello()
    engine.step()
    engine.action()
    with pytest.raises(PolicyError, match="engine boot-1 cannot have it"):
        prepare(config, dataclasses.replace(config, policy=PolicyConfig("fixed:9")), daemon._sessions)
    with pytest.raises(PolicyError, match="unknown policy"):
        prepare(config, dataclasses.replace(config, policy=PolicyConfig("guess")), daemon._sessions)


def test_what_a_policy_handed_over_stays_counted_behind_its_successor(
    start_daemon: Any, make_engine: Any, config: Config
) -> None:
    class Learned:
        name, handed_over = "learned", 3

    daemon: Daemon = start_daemon().daemon
    engine = make_engine()
    engine.hello()
    engine.step()
    engine.action()
    (session,) = daemon._sessions.values()
    session.policy = Learned()  # type: ignore[assignment]
    daemon._put_in_force(prepare(config, dataclasses.replace(config, policy=PolicyConfig("off")), daemon._sessions))
    assert session.policy.name == "off"
    assert session.status(0.0).handed_over == 3


def test_other_objectives_hold_for_who_arrives_behind_a_reload(
    start_daemon: Any, make_engine: Any, make_record: Any, config: Config
) -> None:
    daemon: Daemon = start_daemon(objectives=ObjectivesConfig("interactive:0:300:40")).daemon
    engine = make_engine()
    engine.hello()
    for counter, wanted in ((1, "interactive:0:300:40"), (2, "slow:0:9000:"), (3, "")):
        changed = dataclasses.replace(config, objectives=ObjectivesConfig(wanted))
        daemon._put_in_force(prepare(config, changed, daemon._sessions))
        arrival = RequestEvent("arrival", 10 + counter, counter * 0.01, 90, "r", 0)
        engine.send(msgspec.structs.replace(make_record("boot-1", counter), events=[arrival]))
        engine.action()
    (session,) = daemon._sessions.values()
    assert session.state.requests.column("ttft_s")[session.state.requests.column("handle") > 10].tolist() == [
        0.3,
        9.0,
        float("inf"),
    ]
    assert list(session.status(0.0).attainment) == ["interactive", "slow"]
    with pytest.raises(ConfigError, match=r"objectives\.classes has"):
        prepare(config, dataclasses.replace(config, objectives=ObjectivesConfig("a:0::")), daemon._sessions)


def test_a_running_sidecar_takes_a_file_on_sighup_and_rejects_a_bad_one_whole(
    make_engine: Any, config: Config, tmp_path: Path, eventually: Any
) -> None:
    file = tmp_path / "faser.toml"

    def write(policy: str, steps: str, more: str = "") -> None:
        file.write_text(
            f'[link]\nendpoint = "{config.link.endpoint}"\n[store]\nenabled = false\n'
            f'[mode]\nstate = "{config.mode.state}"\n[policy]\nspec = "{policy}"\n[lease]\nsteps = {steps}\n'
            f"[guard]\nstale_ms = 600000  # the engine of this test has a clock of its own\n{more}"
        )

    def hang_up(saying: bytes) -> None:
        sidecar.send_signal(signal.SIGHUP)
        assert sidecar.stderr is not None
        for line in sidecar.stderr:
            if saying in line:
                return
        pytest.fail(f"the sidecar ended without saying {saying!r}")

    write("fixed:3", "20")
    command = [
        sys.executable,
        "-c",
        "from faser.controller.cli.main import main; main()",
        "sidecar",
        "--config",
        str(file),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FASER_")}
    sidecar = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, cwd="/")
    try:
        engine = make_engine()
        engine.hello()

        def asked() -> tuple[int, int]:
            record = engine.step()
            action = engine.action()
            return action.default_length, action.valid_until_step - record.step

        assert asked() == (3, 20)
        write("fixed:5", "10")
        hang_up(b"policy.spec, lease.steps changed")
        assert asked() == (5, 10)
        for policy, steps, more in (("fixed:9", "8", ""), ("fixed:1", "0", ""), ("fixed:1", "8", "[http]\nx=1\n"),
                                    ("fixed:1", "8", "[nonsense]\n"), ("fixed:1", "8", "= not toml")):  # fmt: skip
            write(policy, steps, more)
            hang_up(b"is rejected, the one in force stays")
            assert asked() == (5, 10)
        write("fixed:2", "9", "hold_records = 3\n")
        hang_up(b"configuration read again")
        assert asked() == (2, 9)
        assert ask(load(file, {}).config.link).policy == "fixed:2"
    finally:
        sidecar.terminate()
        assert sidecar.stderr is not None
        sidecar.stderr.close()
        assert sidecar.wait(20) == 0
