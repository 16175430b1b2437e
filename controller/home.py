"""Where a user's own files lie unless a setting says otherwise: looked for when asked, never at import.

Called by controller/config.py. A user may have no home, such as a container's, a mere number without an entry in
passwd: then there is no such place, and only what needs one may say so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import platformdirs

from .errors import ConfigError

STATE: Final = Path("~/.local/state/faser")  # stands for the user's state folder, wherever that is


def config_file() -> Path | None:
    """Return the configuration file that is read when none is named; None for a user without a home."""
    folder = _folder(platformdirs.user_config_path, "XDG_CONFIG_HOME")
    return None if folder is None else folder / "config.toml"


def state_file(default: Path) -> Path:
    """Return where a default below STATE lies for this user; as it is for one without a home."""
    folder = _folder(platformdirs.user_state_path, "XDG_STATE_HOME")
    return default if folder is None else folder / default.relative_to(STATE)


def _folder(of_user: Callable[[str], Path], variable: str) -> Path | None:
    """Return one of the user's folders; None without a home that this user can enter: HOME may still be root's.

    :param variable: names the folder instead, and is taken at its word
    """
    try:
        folder = of_user("faser")
    except RuntimeError:
        return None
    home = os.path.expanduser("~")
    is_closed = os.path.exists(home) and not os.access(f"{home}/.", os.X_OK)
    return None if is_closed and not os.path.isabs(os.environ.get(variable, "")) else folder


def is_homeless(path: object) -> bool:
    """Return whether a path is a default that found no home."""
    return isinstance(path, Path) and path.parts[:1] == ("~",)


def require_home(paths: Iterable[tuple[Path, str]]) -> None:
    """Raise ConfigError if any of the paths that are about to be used found no home.

    :param paths: each with the variable that names another place
    """
    lost = [(path.name, variable) for path, variable in paths if is_homeless(path)]
    if lost:
        names, variables = (" and ".join(each) for each in zip(*lost, strict=True))
        raise ConfigError(f"no home folder for {names}", "a user with a home", f"set {variables}, or HOME")
