"""Figures in README and docs are those of the committed files."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import faser

ROOT = Path(faser.__file__).parent
SCRIPT = ROOT / "docs" / "figures.py"


@pytest.fixture
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_tied_figure_is_its_files() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_every_results_file_is_named_where_its_figures_stand() -> None:
    told = "\n".join(path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), SCRIPT])
    told += "\n".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))
    missing = [path.name for path in (ROOT / "benchmarks" / "results").glob("*.json") if path.name not in told]
    assert missing == []


def test_a_changed_figure_is_put_right_and_the_rest_of_a_page_left_alone(figures: ModuleType) -> None:
    page = (ROOT / "docs" / "policies.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| price | "))
    spoilt = page.replace(row, row.replace("0.", "1."))
    assert spoilt != page
    assert figures.written("docs/policies.md", spoilt) == page


def test_a_page_that_lost_its_marks_is_named(figures: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"docs/policies\.md: no block <!-- figures: policies -->"):
        figures.written("docs/policies.md", "nothing")
    blocks = [name for page, name in figures.BLOCKS if page == "docs/bench.md"]
    bare = "\n".join(f"<!-- figures: {name} -->\n\n<!-- end of figures -->\n" for name in blocks)
    with pytest.raises(SystemExit, match=r"docs/bench\.md: 0 lines begin with"):
        figures.written("docs/bench.md", bare)


def test_the_readmes_costs_are_written_from_all_runs(figures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def adapter(p50_us: float) -> list[dict[str, Any]]:
        return [
            {"requests": requests, "caches": caches, "bound_us": 20.0 + 0.7 * requests, "p50_us": p50_us + requests}
            for requests in (1, 8, 64, 256)
            for caches in ("back to back", "after a pause", "flushed")
        ]

    content = {
        "adapter": [adapter(20.0), adapter(29.0), adapter(23.0)],
        "store": [{"steps_per_s": 7012.3}],
        "fleet": [
            {
                "runs": [
                    {"engines": 24, "keeps_up": True, "core_share": 0.714, "answered_in_time": 1.0},
                    {"engines": 32, "keeps_up": False, "core_share": 0.99, "answered_in_time": 0.876},
                ]
            }
        ],
        "decide": [{"requests": {"64": {"policy_p50_us": 23.2}, "256": {"policy_p50_us": 24.4}}}],
        "round_trip": [
            [
                {
                    "cores": cores,
                    "requests": n,
                    "pause_ms": pause_ms,
                    "p50_us": 800.0 + n + pause_ms + 90.0 * (cores == "any"),
                    "p99_us": 1234.0,
                    "bare_us": 61.0 + pause_ms,
                }
                for cores in ("own", "any")
                for n in (64, 256)
                for pause_ms in (0.0, 5.0)
            ]
        ]
        * 2,
    }
    monkeypatch.setattr(figures.page_lines, "read", lambda name: content)
    told = [make() for make in figures.MEASURED.values()]
    assert told[0].startswith(
        "| adapter on the engine thread, a core of its own, 1 / 8 / 64 / 256 requests, p50, median of the runs, back "
        "to back | 24 (21 to 30) / 31 (28 to 37) / 87 (84 to 93) / 279 (276 to 285) us | 21 / 26 / 65 / 199 us |"
    )
    assert told[3] == "| policy alone, 64 / 256 requests, p50 | 23 / 24 us | 100 / 250 us | `benchmarks/decide.py` |"
    assert told[4].startswith("| telemetry store | 7,012 steps/s of 64 requests | 100 |")
    assert "within 20 ms | 24 (71 % of the core); 32: 87.6 % | 32 |" in told[5]
    assert told[6].startswith("cores that sleep. One core answered 24 engines of 64 requests in time")
    bare = "; p99 at 64 at most 1.2 ms; the bare socket 61 (61 to 61) us |"
    assert f"each process on its own core | 864 (864 to 864) / 1056 (1056 to 1056) us{bare}" in told[7]
    assert "every 5 ms | 869 (869 to 869) / 1061 (1061 to 1061) us; p99 at 64 at most 1.2 ms; " in told[8]
    assert f"wherever the system puts the processes | 954 (954 to 954) / 1146 (1146 to 1146) us{bare}" in told[9]
    assert "wherever it puts them, with a step every 5 ms | 959 (959 to 959) / 1151 (1151 to 1151) us;" in told[10]
    for page, begin in figures.MEASURED:
        assert sum(line.startswith(begin) for line in (ROOT / page).read_text().splitlines()) == 1


def test_no_measured_figure_stands_where_no_file_writes_it(figures: ModuleType) -> None:
    assert list(figures.untied()) == []


def test_a_figure_that_somebody_typed_is_told(figures: ModuleType) -> None:
    page = (ROOT / "docs" / "policies.md").read_text()
    typed = page.replace("## Which split", "It gains 7 % there.\n\n## Which split")
    (line,) = figures.untied({"docs/policies.md": typed})
    assert line.endswith("It gains 7 % there.")


def test_every_line_whose_figures_were_set_is_still_there(figures: ModuleType) -> None:
    gone = [
        beginning
        for page, beginnings in figures.SET.items()
        for beginning in beginnings
        if not any(line.startswith(beginning) for line in (ROOT / page).read_text().splitlines())
    ]
    assert gone == []
