"""The order in which `faser --help` lists commands: four groups, as in the README. Called by controller/cli/main.py."""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperGroup

GROUPS: Final = {
    "Serve": ("demo", "serve", "fleet", "sidecar", "doctor", "config", "keys"),
    "Watch": ("status", "top", "mode", "replay", "store"),
    "Measure": ("bench", "profile", "calibrate", "fidelity", "evaluate", "policy"),
    "Train": ("train", "sweep", "drafter", "exits"),
}


class GroupedCommands(TyperGroup):
    """A command whose help lists its sub-commands group by group."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the groups; a command that stands in none comes last, so that it is not lost."""
        named = {name for names in GROUPS.values() for name in names}
        others = tuple(name for name in self.list_commands(ctx) if name not in named)
        width = max(map(len, self.commands))
        for title, names in {**GROUPS, "Other": others}.items():
            rows = [(name.ljust(width), self._short_help(ctx, name)) for name in names if name in self.commands]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _short_help(self, ctx: Any, name: str) -> str:
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(limit=100)
