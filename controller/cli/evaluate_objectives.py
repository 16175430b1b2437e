"""`faser evaluate --objectives`: who keeps the objectives of urgent requests where not everybody can be fast.

Called by controller/cli/evaluate.py.
"""

from __future__ import annotations

from concurrent.futures import Executor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:  # numpy comes with it: `faser --help` must not wait for it
    from ...models.evaluation.evaluate import Decide


def objectives(
    policies: str, worlds: str, seeds: int, steps: int, pool: AbstractContextManager[Executor | None], decide: Decide
) -> dict[str, Any]:
    """Return the summary; raise UsageError for an engine or a policy that nobody knows."""
    from rich.console import Console

    from ...env.spaces import Capabilities
    from ...models.evaluation.objective_table import ObjectivePlan, compare, summary
    from ...models.evaluation.objective_worlds import knee_worlds
    from ...models.registry import make_policy
    from ..progress import progress_bar

    known = knee_worlds()
    engines = dict.fromkeys(world.world.name for world in known)
    named = [name for name in worlds.split(",") if name] or list(engines)
    if unknown := [name for name in named if name not in engines]:
        raise UsageError(f"world {', '.join(unknown)}", f"some of {', '.join(engines)}")
    chosen = tuple(world for world in known if world.world.name in named)
    for spec in policies.split():
        make_policy(spec, Capabilities(k_max=min(world.world.profile.k_max for world in chosen)))
    seen = tuple(101 + number for number in range(seeds))
    plan = ObjectivePlan(tuple(dict.fromkeys(policies.split())), chosen, seen, steps)
    console = Console(stderr=True)
    with progress_bar(console) as show, pool as executor:
        runs = compare(plan, decide, executor, lambda done, total: show("evaluating", done / total))
    return summary(plan, runs)


def drawn(result: dict[str, Any]) -> str:
    """Return the summary as text."""
    lines = []
    for name, rows in result["runs"].items():
        lines += [
            name,
            f"  {'policy':12} {'goodput':>9} {'tokens/s':>9} {'late':>7} {'urgent in time':>15} {'batch':>7}",
        ]
        for policy, row in sorted(rows.items(), key=lambda entry: -entry[1]["goodput"]):
            urgent, batch = row["in_time"].values()
            lines.append(
                f"  {policy:12} {row['goodput']:9.1f} {row['tokens_per_s']:9.1f} {row['late_share']:7.1%} "
                f"{urgent:15.1%} {batch:7.1%}"
            )
    for policy, row in result["standing"].items():
        keys = ("goodput_over_unaware", "goodput_over_best_rule", "goodput_over_price")
        over = {key: row[key] for key in keys if row[key] is not None}
        told = ", ".join(f"{key.replace('_', ' ')} {_told(value)}" for key, value in over.items())
        lines.append(f"{policy}: violations {row['violations_over_unaware']:.2f} of the best unaware rival's, {told}")
    names = {
        "clairvoyant": "who knows what will be accepted", "even_clairvoyant": "who knows it, and no objectives",
        "known": "the best known policy of each world",
    }  # fmt: skip
    lines += [f"{name}: {_told_frontier(result['frontier'][key])}" for key, name in names.items()]
    return "\n".join([*lines, f"{len(result['worlds'])} worlds, {result['seeds']} seeds"])


def _told_frontier(points: list[tuple[float, float]]) -> str:
    """Say how much goodput goes with a third of the violations, and at most."""
    from ...models.evaluation.objective_table import A_THIRD

    within = [goodput for violations, goodput in points if violations <= A_THIRD]
    least, most = min(points), max(points, key=lambda point: point[1])
    told = (
        f"goodput {max(within):.3f} with a third" if within else f"no third: at least {least[0]:.2f} ({least[1]:.3f})"
    )
    return f"{told}, at most {most[1]:.3f} with {most[0]:.2f} of the violations"


def _told(value: dict[str, float | None]) -> str:
    span = "" if value["low"] is None else f" ({value['low']:.3f} to {value['high']:.3f})"
    return f"{value['ratio']:.3f}{span}"
