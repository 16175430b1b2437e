"""docs/results.md tells of a fleet what benchmarks/replicas.py measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import faser

ROOT = Path(faser.__file__).parent


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "replicas.json").read_text())
    return measured


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """Return the table's figures by what they are of."""
    (section,) = re.findall(
        r"^## A fleet on two cores\n(.*?)^## ", (ROOT / "docs" / "results.md").read_text(), re.M | re.S
    )
    return dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section, re.M))


def test_the_table_says_what_was_measured(found: dict[str, Any], rows: dict[str, str]) -> None:
    def failed(part: str) -> str:
        return f"{found[part]['failed']} of {found[part]['answers']}"

    def added(way: str) -> str:
        spent = found["entry_point"][way]
        return f"{spent['difference_ms']:.2f} ms (from {spent['direct_ms']:.2f} to {spent['through_ms']:.2f})"

    assert rows["first engine, from asking Ray until it serves"] == f"{found['first_start_s']} s"
    assert rows["second engine, while eight clients keep the first busy"] == f"{found['added_start_s']} s"
    assert rows["failed answers while it was added"] == failed("added") == f"0 of {found['added']['answers']}"
    assert rows["failed answers, one engine's core killed"] == failed("killed")
    assert rows["of these not begun"] == str(found["killed"]["failed_before_begun"]) == "0"
    assert rows["requests made again on the other engine"] == str(found["killed"]["retried"])
    assert rows["failed answers while one was merged away"] == failed("merged") == f"0 of {found['merged']['answers']}"
    assert rows["the entry point adds to a request without a token"] == added("version")
    assert rows["to a request of one token"] == added("one_token")
    assert rows["to a stream of 48 tokens"] == added("stream_of_48")
    assert rows["whole answers that differ from one engine's alone"] == str(
        sum(found[part]["different"] for part in ("added", "killed", "merged"))
    )
