"""The sidecar's configuration: one frozen dataclass per part, filled from file < environment < flags.

Called by the CLI. It opens no socket and starts nothing; an unknown key is an error that names the nearest valid
one. The engine's side has its own FASER_* table in engine_adapter/settings.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, get_args, get_type_hints

from ..engine_adapter.protocol import Mode
from ..engine_adapter.settings import SETTINGS as ENGINE_SETTINGS
from ..engine_adapter.settings import default_endpoint
from .errors import ConfigError
from .home import STATE, config_file, is_homeless, require_home, state_file

Value: TypeAlias = str | int | float | bool | Path
T = TypeVar("T", str, int, float, bool, Path)

CONFIG_VARIABLE: Final = "FASER_CONFIG"
HOMELESS: Final = "default, but there is no home folder"
DEFAULT_STORE: Final = STATE / "telemetry.sqlite"
DEFAULT_MODES: Final = STATE / "modes.json"
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


def _option(default: T, help: str, *, variable: str = "", low: float = -math.inf, high: float = math.inf) -> T:
    """Describe one setting; `variable` stands in for the environment name FASER_<PART>_<FIELD>."""
    return dataclasses.field(default=default, metadata={"help": help, "variable": variable, "low": low, "high": high})  # type: ignore[return-value, unused-ignore]


def _place(default: Path, help: str, *, variable: str = "") -> Path:
    """Describe a file of the user's own, which is looked for when a configuration without it is made."""
    metadata = {"help": help, "variable": variable, "low": -math.inf, "high": math.inf, "default": default}
    return dataclasses.field(default_factory=functools.partial(state_file, default), metadata=metadata)


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Where engines and status clients meet the sidecar."""

    endpoint: str = _option(
        "",
        "ipc:// path in a 0700 directory, or tcp:// on loopback; empty: the engine's default",
        variable="FASER_ENDPOINT",
    )
    status_endpoint: str = _option("", "endpoint for `faser status` and `faser top`; empty: beside link.endpoint")
    queue_frames: int = _option(1024, "frames held per engine and direction before they are dropped", low=1, high=65536)
    silent_after_s: float = _option(
        5.0, "time without a record after which a busy engine is shown as silent", low=0.1, high=1e6
    )
    forget_after_s: float = _option(60.0, "time for which an engine that is gone is still shown", low=0.0, high=1e6)
    max_engines: int = _option(64, "engines served at once", low=1, high=4096)
    frames_per_s: int = _option(
        2000, "frames read per second and engine; a burst may have four times as many", low=1, high=10**6
    )
    keys: str = _option("", "folder made by `faser keys new`; engines then need one of its keys (CURVE)")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Who chooses the draft lengths."""

    spec: str = _option(
        "price",
        "a policy, such as price, off, fixed:K or table:FIRST-LAST=K,...; `faser policy list` has all",
        variable="FASER_POLICY",
    )


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """How long a decision holds when no newer one arrives; the engine grants at most its own limit."""

    steps: int = _option(32, "longest lease, in engine steps", variable="FASER_LEASE_STEPS", low=1, high=100_000)
    ms: int = _option(1000, "longest lease, in milliseconds", variable="FASER_LEASE_MS", low=1, high=600_000)


@dataclass(frozen=True, slots=True)
class ModeConfig:
    """What the sidecar may do to engines that nobody switched; see `faser mode`."""

    default: str = _option(
        "active", "mode of engines that nobody switched: active, advisory (decides, sends nothing), canary or off"
    )
    state: Path = _place(DEFAULT_MODES, "the file that keeps switched modes over a restart")  # noqa: RUF009 - makes a field
    canary_share: float = _option(0.1, "share of requests, chosen by their id, that a canary steers", low=0.0, high=1.0)
    canary_epsilon: float = _option(0.1, "chance that a canary request's length is drawn at random", low=0.0, high=1.0)


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """When the sidecar stops trusting what it hears or decides, and what it does then."""

    stale_ms: int = _option(
        500, "delay beyond the fastest records at which a record gets no decision", low=1, high=600_000
    )
    gap_records: int = _option(32, "records lost in a row that count as a fault", low=1)
    hold_records: int = _option(8, "faults after which the lease is given back, within twice as many records", low=1)
    recover_records: int = _option(32, "records without a fault before steering starts again", low=1)
    dwell_records: int = _option(
        0, "records after a change until a request's length may rise again; it may always fall", low=0, high=100_000
    )
    breaker_failures: int = _option(5, "failures in a row after which the policy is switched off", low=1)
    retry_records: int = _option(
        512, "records until a policy that was switched off is tried again; doubles each time", low=1, high=1 << 20
    )
    envelope_margin: float = _option(
        0.15,
        "loss of tokens/s against no speculation at which the policy is switched off; 1: never",
        low=0.0,
        high=1.0,
    )
    envelope_records: int = _option(256, "steps measured before envelope_margin applies", low=8, high=1 << 20)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The telemetry file."""

    enabled: bool = _option(True, "record telemetry and decisions")
    path: Path = _place(DEFAULT_STORE, "the SQLite file", variable="FASER_STORE")  # noqa: RUF009 - makes a field
    queue_records: int = _option(20_000, "records that may wait for the disk before they are dropped", low=1)
    flush_s: float = _option(0.5, "time between two commits", low=0.01, high=60.0)
    max_mb: int = _option(
        4096,
        "size of file and log at which the oldest steps are deleted, MiB; 0: no limit",
        low=0,
        high=1 << 30,
    )
    max_age_h: float = _option(0.0, "age at which steps are deleted, hours; 0: no limit", low=0.0, high=1e6)


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """The file of decisions, one JSON object per line; rarer events are in the log."""

    path: str = _option("", "the audit file; empty: none")
    max_mb: int = _option(64, "size at which the file is rotated, MiB", low=1, high=1 << 20)
    files: int = _option(3, "rotated files to keep", low=0, high=1000)


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP side: metrics, health, status and the web page."""

    listen: str = _option("", "HOST:PORT; beyond loopback it needs a token; empty: no HTTP")
    token_file: str = _option("", "file of mode 0600 with the token for clients; switching modes over HTTP needs it")


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """OpenTelemetry traces: a span per decision."""

    enabled: bool = _option(False, "send a span per decision to an OTLP/HTTP collector, named by the OTEL_* variables")
    ratio: float = _option(
        1.0, "share of decisions that are traced; OTEL_TRACES_SAMPLER wins over it", low=0.0, high=1.0
    )
    queue_spans: int = _option(
        2048, "decisions that may wait for the collector before they are dropped", low=1, high=1 << 20
    )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What the sidecar says on stderr."""

    level: str = _option("info", "debug, info, warning or error", variable="FASER_LOG")
    format: str = _option("text", "text, or json: one object per line")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration."""

    link: LinkConfig = LinkConfig()
    policy: PolicyConfig = PolicyConfig()
    lease: LeaseConfig = LeaseConfig()
    mode: ModeConfig = dataclasses.field(default_factory=ModeConfig)
    guard: GuardConfig = GuardConfig()
    store: StoreConfig = dataclasses.field(default_factory=StoreConfig)
    audit: AuditConfig = AuditConfig()
    http: HttpConfig = HttpConfig()
    trace: TraceConfig = TraceConfig()
    log: LogConfig = LogConfig()


@dataclass(frozen=True, slots=True)
class ConfigSetting:
    """One setting's description: `key` is PART.FIELD as in the file."""

    key: str
    type: type
    default: Value
    help: str
    variable: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Effective:
    """A configuration and, per key, where its value came from."""

    config: Config
    origins: Mapping[str, str]

    def value(self, key: str) -> Value:
        """Return the effective value of PART.FIELD."""
        return value_of(self.config, key)


def value_of(config: Config, key: str) -> Value:
    """Return a configuration's value of PART.FIELD."""
    part, name = key.split(".")
    result: Value = getattr(getattr(config, part), name)
    return result


@functools.cache
def settings() -> Mapping[str, ConfigSetting]:
    """Return the description of every setting by key, in the order of the dataclasses."""
    parts = get_type_hints(Config)
    described = (_describe(part, parts[part], entry) for part in parts for entry in dataclasses.fields(parts[part]))
    return {setting.key: setting for setting in described}


def _describe(part: str, owner: type, entry: dataclasses.Field[Value]) -> ConfigSetting:
    default = entry.metadata.get("default", entry.default)
    if not isinstance(default, (str, int, float, Path)):
        raise AssertionError(f"{part}.{entry.name} has no default")
    variable = entry.metadata["variable"] or f"FASER_{part}_{entry.name}".upper()
    low, high = entry.metadata["low"], entry.metadata["high"]
    kind = get_type_hints(owner)[entry.name]
    return ConfigSetting(f"{part}.{entry.name}", kind, default, entry.metadata["help"], variable, low, high)


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


def require_files(config: Config) -> None:
    """Raise ConfigError, before anything is opened, if the sidecar would write below a home that is not there."""
    needed = {"mode.state": config.mode.state} | ({"store.path": config.store.path} if config.store.enabled else {})
    require_home((path, settings()[key].variable) for key, path in needed.items())


Layer: TypeAlias = tuple[str, Mapping[str, tuple[Value, str]]]


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
