"""Every error a user can meet, as one tree: the kinds are the ground floor's, each floor adds its own.

    FaserError                     1
    ├── CutError                   1   bounds of pipeline stages that do not fit layers or ranks
    ├── UsageError                 2   a flag or argument that cannot be used
    │   ├── ConfigError            2   configuration: unknown key, wrong type, value out of bounds
    │   ├── PolicyError            2   no such policy, or a specification that cannot be read
    │   ├── TraceError             2   arrivals or accept lengths: no such trace, or not a whole one
    │   └── PromptError            2   a file of prompts that is not one
    ├── EndpointError              3   socket: in use, unsafe directory, not on loopback
    │   ├── SettingError           3   a FASER_* variable, or a key or folder that the engine's side shares
    │   └── NotRunningError        3   no sidecar answers
    ├── StoreError                 4   telemetry file: unwritable, not ours, other schema
    ├── EngineError                5   vLLM: does not start, is gone, has no drafter
    │   ├── UnsupportedError       5   a version or a combination FASER does not work with
    │   └── NoReplicaError         5   no replica of a fleet can take a request
    └── ModelError                 6   a model's files: missing, corrupt, not convertible
        ├── ImmovableModelError    6   a model whose layers cannot move between the ranks of a pipeline
        ├── CacheError             6   the cache of converted models cannot be used or filled
        ├── ProfileError           6   a profile that is none, or of another version
        ├── CalibrationError       6   too little was measured to fit a profile to
        ├── ExitError              6   a file of exit heads that is none, or of another model
        ├── ExitTrainingError      6   what exit heads cannot be trained on
        └── DrafterError           6   what a drafter cannot be trained on

The number is the process's exit code. A message is one line: what was seen, what was expected, what to do.
"""

from __future__ import annotations

from ..engine_adapter.errors import EndpointError, EngineError, FaserError, ModelError, StoreError, UsageError


class ConfigError(UsageError):
    """A configuration key or value cannot be used."""


class NotRunningError(EndpointError):
    """No sidecar answers."""


class UnsupportedError(EngineError):
    """A version or a combination that FASER does not work with."""


__all__ = [
    "ConfigError",
    "EndpointError",
    "EngineError",
    "FaserError",
    "ModelError",
    "NotRunningError",
    "StoreError",
    "UnsupportedError",
    "UsageError",
]
