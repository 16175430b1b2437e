"""Taking a changed configuration in while the sidecar runs (SIGHUP): all of it or nothing.

Called by the daemon's loop. `prepare` does everything that can fail and changes nothing; what it returns is then put
in force without a way to fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...env.estimate.objectives import ObjectiveClasses
from ...models.policies.policy import Policy, PolicyError
from ...models.registry import make_policy
from ..config import Config, settings, value_of
from ..decision.session import Session, check_policy
from ..errors import ConfigError
from ..link.keys import Keyring, load_keyring
from ..objectives import parse_objectives

# What is opened once, at start.
FIXED: Final = frozenset(
    {
        "link.endpoint", "link.status_endpoint", "link.queue_frames", "link.keys", "store.enabled", "store.path",
        "store.queue_records", "store.flush_s", "mode.state", "audit.path", "audit.max_mb", "audit.files",
        "http.listen", "http.token_file", "trace.enabled", "trace.ratio", "trace.queue_spans",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prepared:
    """A configuration that can be put in force; `policies` by socket identity, empty if the policy stays."""

    config: Config
    changed: tuple[str, ...]
    policies: Mapping[bytes, Policy]
    objectives: ObjectiveClasses
    keyring: Keyring | None


def prepare(before: Config, after: Config, sessions: Mapping[bytes, Session]) -> Prepared:
    """Check a configuration against what runs; raise FaserError, having changed nothing, if any part cannot be had."""
    changed = tuple(key for key in settings() if value_of(before, key) != value_of(after, key))
    if fixed := FIXED.intersection(changed):
        raise ConfigError(
            f"{', '.join(sorted(fixed))} changed", "settings that can change at run time", "restart the sidecar"
        )
    keyring = load_keyring(Path(after.link.keys)) if after.link.keys else None
    policies = _policies(after, sessions) if "policy.spec" in changed else {}
    objectives = parse_objectives(after.objectives.classes, heeds_own=after.objectives.own)
    return Prepared(after, changed, policies, objectives, keyring)


def _policies(config: Config, sessions: Mapping[bytes, Session]) -> dict[bytes, Policy]:
    check_policy(config.policy.spec)
    made: dict[bytes, Policy] = {}
    for identity, session in sessions.items():
        try:
            made[identity] = make_policy(config.policy.spec, session.state.capabilities)
        except PolicyError as error:
            raise PolicyError(f"engine {session.hello.boot_id} cannot have it: {error}") from None
    return made
