"""The order of the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that start engines first: with the long ones last, one worker would wait for the other at the end."""
    has_engine = {item.path for item in items if item.get_closest_marker("engine") is not None}
    items.sort(key=lambda item: item.path not in has_engine)
