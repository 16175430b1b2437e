"""What of the sidecar can be configured: one frozen dataclass per part; config_layers.py fills them.

The engine's side has its own FASER_* table in engine_adapter/settings.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, get_type_hints

from .home import STATE, require_home, state_file

Value: TypeAlias = str | int | float | bool | Path
T = TypeVar("T", str, int, float, bool, Path)

DEFAULT_STORE: Final = STATE / "telemetry.sqlite"
DEFAULT_MODES: Final = STATE / "modes.json"


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
class ObjectivesConfig:
    """How soon requests are to have their tokens; what a request says itself goes first."""

    classes: str = _option(
        "",
        "objectives by vLLM's priority, NAME:PRIORITY:TTFT_MS:TPOT_MS with commas between; one time may be empty",
    )
    own: bool = _option(True, "heed what a request asks for itself (faser_ttft_ms, faser_tpot_ms)")


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
    objectives: ObjectivesConfig = ObjectivesConfig()
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


def require_files(config: Config) -> None:
    """Raise ConfigError, before anything is opened, if the sidecar would write below a home that is not there."""
    needed = {"mode.state": config.mode.state} | ({"store.path": config.store.path} if config.store.enabled else {})
    require_home((path, settings()[key].variable) for key, path in needed.items())
