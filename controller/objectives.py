"""Objectives by class as the configuration has them: `objectives.classes`, read into what the state goes by.

Called where a configuration is checked, by the daemon, and by readers of telemetry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import combinations
from typing import Final

from ..engine_adapter.protocol import LARGEST_PRIORITY, TPOT_MS, TTFT_MS
from ..env.estimate.objectives import OWN, ObjectiveClass, ObjectiveClasses, TimeObjective
from .errors import ConfigError

FORM: Final = "NAME:PRIORITY:TTFT_MS:TPOT_MS with one time or both, such as interactive:0:300:40, batch:1::400"
NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


def parse_objectives(text: str, *, heeds_own: bool = True) -> ObjectiveClasses:
    """Read classes with commas between them; raise ConfigError for what is none, or contradicts itself.

    :param heeds_own: whether what a request asks for itself counts, too
    """
    classes = tuple(_parse(part.strip()) for part in text.split(",")) if text.strip() else ()
    for one, other in combinations(classes, 2):
        if one.name == other.name or one.priority == other.priority:
            same = f"the name {one.name}" if one.name == other.name else f"priority {one.priority}"
            raise _refused(f"{same} twice", "each name and each priority once")
    return ObjectiveClasses(classes, heeds_own)


def _parse(part: str) -> ObjectiveClass:
    fields = [field.strip() for field in part.split(":")]
    if len(fields) != 4:
        raise _refused(f"the class {part!r}", FORM)
    name, priority, ttft_ms, tpot_ms = fields
    if not NAME.fullmatch(name) or name == OWN:
        raise _refused(f"the name {name!r}", f"letters, digits, - and _, a letter first, 32 at most, and not {OWN!r}")
    if not re.fullmatch(r"-?\d{1,19}", priority, re.ASCII) or abs(int(priority)) > LARGEST_PRIORITY:
        raise _refused(f"{part!r} with the priority {priority!r}", f"a whole number, as requests have; {FORM}")
    objective = TimeObjective(*_seconds(part, (ttft_ms, tpot_ms)))
    if not objective.is_given:
        raise _refused(f"{part!r} without a time", FORM)
    return ObjectiveClass(name, int(priority), objective)


def _seconds(part: str, times: Iterable[str]) -> Iterable[float]:
    for text, (least, most) in zip(times, (TTFT_MS, TPOT_MS), strict=True):
        if not text:
            yield math.inf
        elif not re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII) or not least <= float(text) <= most:
            raise _refused(f"{part!r} with {text!r}", f"from {least:g} to {most:.0f} ms; {FORM}")
        else:
            yield float(text) / 1e3


def _refused(seen: str, expected: str) -> ConfigError:
    return ConfigError(f"objectives.classes has {seen}", expected)
