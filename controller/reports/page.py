"""A report as one HTML file without outside links. Called by run_report.py and replay_report.py."""

from __future__ import annotations

from pathlib import Path

import jinja2

from ..errors import StoreError
from ..whole_file import replacing


def write_page(path: Path, template: str, **content: object) -> None:
    """Fill a template of controller/reports/templates and write it; raise StoreError if it cannot be written."""
    loader = jinja2.PackageLoader("faser.controller.reports")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.get_template(template).render(content)
    try:
        with replacing(path) as place:
            place.write_text(page, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}", "a writable path") from None
