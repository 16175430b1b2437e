"""What came of `faser demo --tour`: a line for each station, in a table or as one JSON object.

Made by controller/demo/tour/tour.py. Scripts read the field names: add, never rename.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
from rich.table import Table

from .sentences import idle_mechanisms, told
from .station_steps import StationFigures

GATES: Final = {"pruning": "FASER_PRUNE", "ahead": "FASER_DRAFT_AHEAD", "groups": "FASER_PING_PONG"}


class StationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One station; rates in tokens per second as the clients saw them."""

    name: str
    engine: str
    mechanisms: tuple[str, ...]
    policy: str
    note: str
    refused: str = ""  # why this machine cannot have it; then nothing else is known
    failed: str = ""  # why it has no figures, or not all
    did: str = ""  # in words
    idle: list[str] = []  # of the mechanisms, those that left no trace
    tokens: int = 0
    wrong_tokens: int = 0  # other than no speculation said
    tokens_per_s: float | None = None
    over_none: float | None = None  # times the rate without speculation
    disturbed: str = ""  # by what other work: the rates say little then
    beside: str = ""
    over_beside: float | None = None  # times the rate of the station that drafts the same without it
    figures: StationFigures = StationFigures()

    @property
    def is_shown(self) -> bool:
        """Whether it was served and what was forced did something; beside others one may find nothing left to do."""
        return not (self.refused or self.failed) and len(self.idle) < len(self.mechanisms) and self.tokens > 0

    def line(self) -> str:
        """Return what came of it in one line."""
        if self.refused or self.failed:
            return f"{self.name}: {self.refused and 'cannot be had here: '}{self.refused or self.failed}"
        beside = f", {_times(self.over_beside)} of {self.beside}" if self.beside else ""
        idle = f"; NOTHING SEEN of {', '.join(self.idle)}" if self.idle else ""
        return (
            f"{self.name}: {self.did}{idle}; {self.tokens_per_s or math.nan:.0f} tokens/s, "
            f"{_times(self.over_none)} of no speculation{beside}{'*' * bool(self.disturbed)}; "
            f"{self.wrong_tokens} wrong tokens"
        )

    def with_steps(self, figures: StationFigures) -> StationResult:
        """Return it with what its steps did."""
        if self.refused or self.failed:
            return self
        idle = idle_mechanisms(self.mechanisms, figures)
        return msgspec.structs.replace(self, figures=figures, did=told(self.mechanisms, figures), idle=idle)


class TourResult(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of `--json`."""

    prompts: int
    tokens: int  # of each round of all prompts
    plain_tokens_per_s: float | None = None  # without speculation
    stations: list[StationResult] = []
    disturbed: str = ""  # by what other work, while nothing was speculated
    wall_s: float = 0.0
    cores: int = 0
    is_interrupted: bool = False
    telemetry_path: str = ""
    picture_path: str = ""

    @property
    def exit_code(self) -> int:
        """0; 1 if a token was wrong, a request failed or something that was forced did nothing; 130 after Ctrl-C."""
        if self.is_interrupted:
            return 130
        are_fine = all(each.wrong_tokens == 0 and (each.refused or each.is_shown) for each in self.stations)
        return int(not (self.stations and are_fine))

    def against_their_drafts(self) -> TourResult:
        """Return it with each station's rate beside that of the station which drafts the same without it."""
        rates = {each.name: each.tokens_per_s for each in self.stations}
        stations = [
            msgspec.structs.replace(each, over_beside=over(each.tokens_per_s, rates.get(each.beside)))
            for each in self.stations
        ]
        return msgspec.structs.replace(self, stations=stations)

    def closing_lines(self) -> list[str]:
        """Return what the table leaves open: whether tokens were wrong, and what the gates would do here."""
        served = [each for each in self.stations if each.tokens]
        wrong, tokens = sum(each.wrong_tokens for each in served), sum(each.tokens for each in served)
        lines = [f"{wrong} of {tokens} tokens other than no speculation says (greedy, float32)"]
        slower = {
            GATES[name]: f"{each.name} {each.over_beside:.2f}"
            for each in served
            for name in each.mechanisms
            if len(each.mechanisms) == 1 and name in GATES and each.over_beside is not None and each.over_beside < 1.0
        }
        if slower:
            lines.append(
                f"slower here than the same drafts without it: {', '.join(slower.values())}. The gates that leave "
                f"this off ({', '.join(slower)}) were held open for the tour"
            )
        if found := [f"{name} ({reason})" for name, reason in self._disturbances() if reason]:
            lines.append(f"* disturbed by other work, so that rates say little: {', '.join(found)}")
        return lines

    def _disturbances(self) -> list[tuple[str, str]]:
        return [("no speculation", self.disturbed), *((each.name, each.disturbed) for each in self.stations)]

    def table(self) -> Table:
        """Return a row of numbers for each station."""
        plain = _rate(self.plain_tokens_per_s) + "*" * bool(self.disturbed)
        title = f"{self.prompts} prompts at every station; no speculation: {plain} tokens/s"
        table = Table(title=title, title_justify="left")
        table.add_column("station", no_wrap=True)
        for name in ("tokens/s", "over no\nspeculation", "over the same\nwithout it", "wrong\ntokens"):
            table.add_column(name, justify="right")
        for each in self.stations:
            rates = (
                _rate(each.tokens_per_s) + "*" * bool(each.disturbed),
                _times(each.over_none),
                _times(each.over_beside),
            )
            table.add_row(each.name, *rates, str(each.wrong_tokens) if each.tokens else "-")
        return table


def over(rate: float | None, other: float | None) -> float | None:
    """Return how many times as fast; None where either is unknown."""
    return round(rate / other, 3) if rate and other else None


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
