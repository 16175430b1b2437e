"""Objectives by class in the configuration: what is read, and one clear line for what contradicts itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from faser.controller.config_layers import as_toml, load
from faser.controller.errors import ConfigError
from faser.controller.objectives import parse_objectives
from faser.engine_adapter.protocol import RequestEvent
from faser.env.estimate.objectives import ObjectiveClass, ObjectiveClasses, TimeObjective


def test_classes_are_read_with_one_time_or_both() -> None:
    assert parse_objectives(" interactive:0:300:40, batch:1::400,bulk:-3:60000:") == ObjectiveClasses(
        (
            ObjectiveClass("interactive", 0, TimeObjective(0.3, 0.04)),
            ObjectiveClass("batch", 1, TimeObjective(math.inf, 0.4)),
            ObjectiveClass("bulk", -3, TimeObjective(60.0, math.inf)),
        )
    )
    assert parse_objectives("") == parse_objectives("  ") == ObjectiveClasses()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a:0:300:40, b:0:1:1", "objectives.classes has priority 0 twice; expected each name and each priority once"),
        ("a:0:300:40, a:1:1:1", "objectives.classes has the name a twice; expected each name and each priority once"),
        ("a:0:300", "objectives.classes has the class 'a:0:300'; expected NAME:PRIORITY:TTFT_MS:TPOT_MS"),
        ("a:0:300:40,", "objectives.classes has the class ''; expected NAME"),
        ("own:0:300:40", "objectives.classes has the name 'own'; expected letters"),
        ("0:0:300:40", "objectives.classes has the name '0'; expected letters"),
        (f"{'a' * 33}:0:300:40", "expected letters, digits, - and _, a letter first, 32 at most, and not 'own'"),
        ("a:x:300:40", "with the priority 'x'; expected a whole number, as requests have; NAME"),
        (f"a:{1 << 63}:300:40", "expected a whole number, as requests have"),
        ("a:0::", "objectives.classes has 'a:0::' without a time; expected NAME"),
        ("a:0:0.5:40", "with '0.5'; expected from 1 to 600000 ms"),
        ("a:0:600001:40", "with '600001'; expected from 1 to 600000 ms"),
        ("a:0:300:0.05", "with '0.05'; expected from 0.1 to 60000 ms"),
        ("a:0:nan:40", "with 'nan'; expected from 1 to 600000 ms"),
        ("a:0:1e3:40", "with '1e3'; expected from 1 to 600000 ms"),
    ],
)
def test_what_is_no_class_or_contradicts_another_is_one_line(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(environment={"FASER_OBJECTIVES_CLASSES": text})
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_configuration_file_has_them_and_is_written_out_with_them(tmp_path: Path) -> None:
    path = tmp_path / "faser.toml"
    path.write_text("[objectives]\nclasses = 'interactive:0:300:40, batch:1::400'\n")
    effective = load(path)
    assert [each.name for each in parse_objectives(effective.config.objectives.classes).classes] == [
        "interactive",
        "batch",
    ]
    path.write_text(as_toml(effective))
    assert load(path).config == effective.config


def test_what_a_request_asks_for_itself_can_be_left_out() -> None:
    """Then its class decides, and it counts under that."""
    classes = parse_objectives("interactive:0:300:40", heeds_own=False)
    arrival = RequestEvent("arrival", 1, 0.0, 10, "r1", 0, tpot_ms=1.0)
    assert classes.objective(arrival) == TimeObjective(0.3, 0.04)
    assert classes.name(arrival) == "interactive"
