"""Where the sidecar's configuration comes from: file < environment < flags, checked, and written out again.

Called by the CLI. It opens no socket and starts nothing; an unknown key is an error that names the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, get_args, get_type_hints

from ..engine_adapter.protocol import Mode
from ..engine_adapter.settings import SETTINGS as ENGINE_SETTINGS
from ..engine_adapter.settings import default_endpoint
from .config import Config, ConfigSetting, Value, settings, value_of
from .errors import ConfigError
from .home import config_file, is_homeless
from .objectives import parse_objectives

Layer: TypeAlias = tuple[str, Mapping[str, tuple[Value, str]]]

CONFIG_VARIABLE: Final = "FASER_CONFIG"
HOMELESS: Final = "default, but there is no home folder"
# Read elsewhere, so not unknown.
OTHER_VARIABLES: Final = (
    *(setting.name for setting in ENGINE_SETTINGS.values()),
    CONFIG_VARIABLE,
    "FASER_RUNTIME_DIR",
    "FASER_CACHE",
)
# Kubernetes adds FASER_SERVICE_* and FASER_PORT* to every pod
# of a namespace with a service named faser: those are nobody's mistake.
NOT_OURS: Final = ("FASER_SERVICE_", "FASER_PORT")


@dataclass(frozen=True, slots=True)
class Effective:
    """A configuration and, per key, where its value came from."""

    config: Config
    origins: Mapping[str, str]

    def value(self, key: str) -> Value:
        """Return the effective value of PART.FIELD."""
        return value_of(self.config, key)


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Value | None] | None = None,
) -> Effective:
    """Merge file < environment < flags into a configuration; a flag that is None was not given.

    Without `file`, FASER_CONFIG and then the user's configuration directory name it; only that last one may be absent.
    """
    environment = environment or {}
    values: dict[str, Value] = {}
    origins = dict.fromkeys(settings(), "default")
    for origin, layer in (_file_layer(file, environment), _environment_layer(environment), _flag_layer(flags or {})):
        for key, (value, where) in layer.items():
            values[key], origins[key] = value, f"{origin} {where}".strip()
    if not values.get("link.endpoint"):
        values["link.endpoint"] = default_endpoint(environment)
    return Effective(_build(values), origins)


def _file_layer(file: Path | None, environment: Mapping[str, str]) -> Layer:
    named = file or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    path = named or config_file()
    if path is None:
        return "file", {}
    try:
        with path.open("rb") as stream:
            document = tomllib.load(stream)
    except (FileNotFoundError, NotADirectoryError):  # HOME may be /dev/null
        if named is None:
            return "file", {}
        raise ConfigError(f"no configuration file {path}", "an existing TOML file", "check --config") from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            remedy=f"check its permissions or set {CONFIG_VARIABLE}",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", "lines like [policy] and spec = 'price'") from None
    return "file", {key: (value, str(path)) for key, value in _flatten(document, path)}


def _flatten(document: Mapping[str, object], path: Path) -> Iterable[tuple[str, Value]]:
    parts = get_type_hints(Config)
    for part, table in document.items():
        if part not in parts:
            raise _unknown(f"part [{part}] in {path}", part, parts)
        if not isinstance(table, dict):
            raise ConfigError(f"{part} = {table!r} in {path}", f"a table [{part}]")
        for name, value in table.items():
            yield f"{part}.{name}", _check(f"{part}.{name}", value, str(path))


def _environment_layer(environment: Mapping[str, str]) -> Layer:
    by_variable = {setting.variable: setting for setting in settings().values()}
    layer: dict[str, tuple[Value, str]] = {}
    for variable, text in environment.items():
        if setting := by_variable.get(variable):
            layer[setting.key] = (_check(setting.key, _parse(setting, text), variable), variable)
        elif variable.startswith("FASER_") and variable not in OTHER_VARIABLES and not variable.startswith(NOT_OURS):
            raise _unknown(f"environment variable {variable}", variable, (*by_variable, *OTHER_VARIABLES))
    return "environment", layer


def _flag_layer(flags: Mapping[str, Value | None]) -> Layer:
    return "flag", {key: (_check(key, value, "flag"), "") for key, value in flags.items() if value is not None}


def _parse(setting: ConfigSetting, text: str) -> object:
    """Read an environment variable as the setting's type; what cannot be read stays text and fails the check."""
    if setting.type is bool:
        return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}.get(text.lower(), text)
    if setting.type in (int, float):
        try:
            return int(text) if setting.type is int else float(text)
        except ValueError:
            return text
    return text


def _check(key: str, value: object, where: str) -> Value:
    """Return the value as the setting's type, within its bounds."""
    setting = settings().get(key)
    if setting is None:
        raise _unknown(f"key {key} in {where}", key, settings())
    if isinstance(value, str | Path):
        _require_text(key, str(value), where)
    if setting.type is Path and isinstance(value, str | Path) and str(value):
        try:
            return Path(value).expanduser()
        except RuntimeError:
            raise ConfigError(f"{key} = {str(value)!r} from {where}", "a user with a home folder after ~") from None
    if setting.type is float and type(value) is int:
        value = float(value)
    if type(value) is not setting.type or not isinstance(value, str | int | float):
        raise ConfigError(f"{key} = {value!r} from {where}", f"a value of type {setting.type.__name__}", setting.help)
    if isinstance(value, int | float) and not setting.low <= value <= setting.high:
        raise ConfigError(f"{key} = {value!r} from {where}", f"a number from {setting.low:g} to {setting.high:g}")
    return value


def _require_text(key: str, text: str, where: str) -> None:
    """Raise ConfigError for what no path and no JSON text can hold: a zero byte, bytes that are not UTF-8."""
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"{key} = {text!a} from {where}", "UTF-8 text without zero bytes", "choose another name")


def _unknown(seen: str, key: str, valid: Iterable[str]) -> ConfigError:
    names = list(valid)
    nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
    return ConfigError(
        f"unknown {seen}", f"a name such as {nearest[0]}", "docs/reference/settings.md lists all of them"
    )


def _build(values: Mapping[str, Value]) -> Config:
    built = {}
    for part, owner in get_type_hints(Config).items():
        names = [entry.name for entry in dataclasses.fields(owner)]
        built[part] = owner(**{name: values[f"{part}.{name}"] for name in names if f"{part}.{name}" in values})
    if built["log"].level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"log.level = {built['log'].level!r}", "debug, info, warning or error")
    if built["log"].format not in ("text", "json"):
        raise ConfigError(f"log.format = {built['log'].format!r}", "text or json")
    if built["mode"].default not in get_args(Mode):
        raise ConfigError(f"mode.default = {built['mode'].default!r}", " or ".join(get_args(Mode)))
    parse_objectives(built["objectives"].classes)
    return Config(**built)


def as_json(effective: Effective) -> str:
    """Return the values by key as one JSON object; null for a file without a place."""
    values = {key: effective.value(key) for key in settings()}
    found = {key: None if is_homeless(value) else value for key, value in values.items()}
    return json.dumps(found, default=str, indent=2)


def as_toml(effective: Effective) -> str:
    """Return a configuration file with these values; comments say where each came from and what it means."""
    lines: list[str] = []
    for key, setting in settings().items():
        part, name = key.split(".")
        if f"[{part}]" not in lines:
            lines += ["", f"[{part}]"]
        # JSON's strings, numbers and booleans are TOML's too.
        value = json.dumps(effective.value(key), default=str, ensure_ascii=False)
        is_lost = is_homeless(effective.value(key))
        origin = HOMELESS if is_lost else effective.origins[key]
        lines.append(f"{'# ' * is_lost}{name} = {value}  # {origin}; {setting.variable}: {setting.help}")
    return "\n".join(lines[1:])
