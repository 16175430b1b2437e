"""`faser sidecar` as a child: started beside an engine of ours, with the configuration in its environment.

Called by `faser serve`, `faser demo`, `faser profile` and the benchmark.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Final

from ...engine_adapter.settings import ensure_private_folder, runtime_folder
from ..config import Config, LinkConfig, require_files, settings, value_of
from ..config_layers import CONFIG_VARIABLE
from ..errors import EndpointError, EngineError, FaserError
from ..home import is_homeless
from ..link.ask import ask
from ..link.endpoint import Endpoint
from .processes import ProcessTree

_CHANGE_S: Final = 10.0
COMMAND: Final = (sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()", "sidecar")


def start_sidecar(config: Config, log: Path | None = None, policy_file: Path | None = None) -> ProcessTree | None:
    """Start `faser sidecar` with this configuration; None if one already owns the endpoint.

    :param policy_file: is written, and the policy read from it, so that `change_policy` can change it
    """
    try:
        Endpoint(config.link.endpoint, is_encrypted=bool(config.link.keys)).close()
    except EndpointError as error:
        if "running sidecar" in error.seen:
            return None
        raise
    require_files(config)
    log = log or log_folder() / f"sidecar-{os.getpid()}.log"
    log.unlink(missing_ok=True)
    environment = os.environ | sidecar_environment(config)
    if policy_file is not None:
        _write_policy(policy_file, config.policy.spec)
        del environment[settings()["policy.spec"].variable]  # it would win over the file
        environment[CONFIG_VARIABLE] = str(policy_file.absolute())
    return ProcessTree(COMMAND, environment, log, cwd=Path.cwd(), grace_s=10.0)


def own_sidecar(config: Config, log: Path, policy_file: Path | None = None) -> ProcessTree:
    """Start one; raise EndpointError where another one already owns the endpoint. Parameters as above."""
    if (sidecar := start_sidecar(config, log, policy_file)) is None:
        raise EndpointError(f"a sidecar already runs at {config.link.endpoint}", "none", "stop it")
    return sidecar


def change_policy(sidecar: ProcessTree, link: LinkConfig, file: Path, spec: str) -> None:
    """Let a running sidecar decide by another policy; raise EngineError if it does not take it.

    :param file: that it was started with
    """
    _write_policy(file, spec)
    sidecar.hang_up()
    end_s = time.monotonic() + _CHANGE_S
    while time.monotonic() < end_s:
        with contextlib.suppress(FaserError):
            if ask(link, timeout_s=1.0).policy == spec:
                return
        time.sleep(0.05)
    raise EngineError(f"the sidecar does not take the policy {spec}", remedy=f"see {sidecar.log}")


def _write_policy(file: Path, spec: str) -> None:
    file.write_text(f"[policy]\nspec = {json.dumps(spec)}\n")  # JSON's strings are TOML's too


def await_introduction(config: Config, sidecar: ProcessTree, limit_s: float, remedy: str, name: str = "vLLM") -> None:
    """Wait until an engine has introduced itself to the sidecar; raise EngineError if none does."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if (code := sidecar.poll()) is not None:
            raise EngineError(f"the sidecar ended with code {code} while starting", remedy=f"see {sidecar.log}")
        with contextlib.suppress(FaserError):
            if ask(config.link, timeout_s=1.0).engines:
                return
        time.sleep(0.1)
    raise EngineError(
        f"{name} runs but did not introduce itself to the sidecar", f"a hello within {limit_s:g} s", remedy
    )


def sidecar_environment(config: Config) -> dict[str, str]:
    """Return the configuration as FASER_* variables, which win over any file the sidecar might find."""
    pairs = ((setting, value_of(config, key)) for key, setting in settings().items())
    return {
        setting.variable: str(int(value) if isinstance(value, bool) else value)
        for setting, value in pairs
        if not is_homeless(value)
    }


def log_folder() -> Path:
    """Return the folder for the logs of engine and sidecar."""
    folder = runtime_folder() / "logs"
    ensure_private_folder(folder.parent)
    ensure_private_folder(folder)
    return folder
