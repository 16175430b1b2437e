"""The ablation of `price`: what breaks it shows as earnings, what does nothing as none, and a file is gone on from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from faser.models.evaluation.worlds import WorldSpec, held_out
from faser.models.policies import price
from faser.models.policies.step_grid import Choice, choose

STEPS = 60
SEEDS = range(7, 9)


@pytest.fixture(scope="module")
def ablation(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """Return the benchmark's script."""
    return load_script("ablation")


@pytest.fixture
def eagle() -> WorldSpec:
    """Return a world in which drafting pays."""
    return held_out()[0]


def choose_none(*given: Any, **named: Any) -> Choice:
    """Return what is best, and none of it: the broken part."""
    return choose(*given, **named)._replace(threshold=0, depth=0)


def earned(ablation: ModuleType, part: Any, world: WorldSpec, load: int) -> dict[int, float]:
    runs = {
        ablation.key_of(name, world.name, load, seed): ablation.run(one, world, load, seed, STEPS)
        for name, one in ((ablation.WHOLE, None), (part.name, part))
        for seed in SEEDS
    }
    found: dict[int, float] = ablation.earned(runs, part.name, world.name, load, SEEDS, is_goodput=False)
    return found


def test_a_part_that_is_broken_on_purpose_loses(ablation: ModuleType, eagle: WorldSpec) -> None:
    part = ablation.PolicyPart("broken", {"choose": choose_none})
    assert min(earned(ablation, part, eagle, 4).values()) > 1.1
    assert vars(price)["choose"] is choose  # whole again


def test_a_part_that_is_not_replaced_earns_nothing_at_all(ablation: ModuleType, eagle: WorldSpec) -> None:
    """Same requests, same luck: not even noise."""
    assert earned(ablation, ablation.PolicyPart("nothing"), eagle, 4) == dict.fromkeys(SEEDS, 1.0)


def test_every_part_can_be_switched_off(ablation: ModuleType) -> None:
    """A name that `price` does not use any more would be replaced in vain."""
    for part in ablation.PARTS:
        whole = {name: getattr(price, name) for name in part.replaced}
        with part.off():
            assert all(getattr(price, name) is not one for name, one in whole.items())
        assert {name: getattr(price, name) for name in part.replaced} == whole


@pytest.mark.parametrize(
    ("gain", "half_width", "said"),
    [(0.02, 0.01, "yes"), (0.02, 0.016, "open"), (0.02, None, "open"), (0.0, 0.004, "no"), (0.0, 0.0, "no")],
)
def test_a_verdict_is_open_where_the_interval_holds_the_bar(
    gain: float, half_width: float | None, said: str, ablation: ModuleType
) -> None:
    nothing = {"ratio": 1.0, "half_width": 0.001}
    assert ablation.verdict([nothing, {"ratio": 1.0 + gain, "half_width": half_width}]) == said


def test_another_start_goes_on_from_the_file(
    tmp_path: Path, ablation: ModuleType, eagle: WorldSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = ablation.PolicyPart("nothing", worlds=lambda: (eagle,))
    monkeypatch.setattr(ablation, "PARTS", (part,))
    monkeypatch.setattr(ablation, "LOADS", (4,))
    monkeypatch.setattr(ablation, "STEPS", STEPS)
    path = tmp_path / "ablation.json"
    kept = ablation.begun(path, {"steps": STEPS}, {"runs": {}})
    known = ablation.key_of(ablation.WHOLE, eagle.name, 4, 7)
    kept["runs"][known] = (1.0, None)  # no engine is so slow: it was not run again
    ablation.fill(path, kept, range(7, 8))
    runs = json.loads(path.read_text())["runs"]
    assert runs.pop(known) == [1.0, None]
    assert list(runs) == [ablation.key_of("nothing", eagle.name, 4, 7)]
    (point,) = [
        one for one in ablation.points(kept["runs"], range(7, 8)) if one["load"] == "4" and one["world"] == eagle.name
    ]
    assert point["ratio"] < 0.1
    with pytest.raises(SystemExit, match="has settings"):
        ablation.begun(path, {"steps": 1}, {"runs": {}})
