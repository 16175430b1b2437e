"""`faser policy ...`.

What policies there are, and what one of them does. A typer sub-app for controller/cli/main.py.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..whole_file import replacing, require_folder, require_place

if TYPE_CHECKING:
    from rich.console import Console

    from ...models.evaluation.portrait import Stroke
    from ...models.evaluation.slack_portrait import SlackStroke
    from ...models.evaluation.worlds import WorldSpec

app = typer.Typer(help="List the policies; show what one does.", no_args_is_help=True, rich_markup_mode=None)
EMBEDDED = "embedded"


@app.command(name="list")
def list_policies() -> None:
    """List every policy with one line about it."""
    from ...models.registry import POLICIES

    for name, meaning in POLICIES.items():
        typer.echo(f"{name:14} {meaning}")


@app.command()
def show(
    spec: Annotated[str, typer.Argument(help="The policy, as `faser policy list` names it.")] = "price",
    world: Annotated[
        str,
        typer.Option(
            help="The simulated engine: embedded, embedded_ahead, a world of `faser evaluate`, or a profile file."
        ),
    ] = EMBEDDED,
    loads: Annotated[str, typer.Option(help="Running requests.")] = "1,2,4,8,16,32,64",
    slack: Annotated[
        bool, typer.Option("--slack", help="By how far urgent requests are ahead of their objective or behind.")
    ] = False,
    steps: Annotated[int, typer.Option(min=20, max=100_000, help="Engine steps counted in each of six runs.")] = 500,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Draw the picture (SVG) to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Show a policy's lengths, reasons and gain at each load of a simulated engine."""
    from rich.console import Console
    from rich.progress import track

    from ...env.spaces import Capabilities
    from ...models.evaluation.portrait import portray
    from ...models.registry import make_policy
    from .evaluate import MOST_REQUESTS, explained, whole_numbers

    if output is not None:
        require_place(output, "--output")
    chosen = _world(world)
    running = whole_numbers(loads, "loads", MOST_REQUESTS)
    if min(running) < 1:
        raise UsageError(f"loads {loads!r}", "at least one running request")
    make_policy(spec, Capabilities(k_max=chosen.profile.k_max))
    console = Console(stderr=True)
    if slack:
        show_by_slack(spec, chosen, running, steps, console, output, is_json=json)
        return
    strokes = list(
        track(
            portray(spec, chosen, running, steps, explained), "simulating", len(running), console=console,
            transient=True, disable=not console.is_terminal,
        )
    )  # fmt: skip
    told = _manifest_of(spec)
    if json:
        rows = [_row(stroke) for stroke in strokes]
        typer.echo(json_module.dumps({"policy": spec, "world": chosen.name, **told, "loads": rows}))
    else:
        typer.echo(_text(spec, chosen, told, strokes))
    if output is not None:
        from .policy_picture import draw

        with replacing(output) as place:
            place.write_text(draw(spec, chosen.name, strokes))


def show_by_slack(
    spec: str,
    world: WorldSpec,
    loads: Sequence[int],
    steps: int,
    console: Console,
    output: Path | None,
    *,
    is_json: bool,
) -> None:
    """Print, and draw if asked to, what a policy does by slack."""
    from rich.progress import track

    from ...models.evaluation.slack_portrait import EDGES, portray_slack
    from .evaluate import explained

    strokes = list(
        track(
            portray_slack(spec, world, loads, steps, explained), "simulating", len(loads), console=console,
            transient=True, disable=not console.is_terminal,
        )
    )  # fmt: skip
    if is_json:
        rows = [{name: getattr(stroke, name) for name in stroke.__slots__} for stroke in strokes]
        typer.echo(json_module.dumps({"policy": spec, "world": world.name, "slack_edges": EDGES, "loads": rows}))
    else:
        typer.echo(_slack_text(spec, world, strokes))
    if output is not None:
        from .policy_picture import draw_slack

        with replacing(output) as place:
            place.write_text(draw_slack(spec, world.name, strokes))


def _slack_text(spec: str, world: WorldSpec, strokes: list[SlackStroke]) -> str:
    from ...models.evaluation.slack_portrait import EDGES, URGENT_PACE, URGENT_SHARE

    names = [f"< {EDGES[0]:.0f}", *(f"{low:+.0f}.." for low in EDGES)]
    lines = [
        f"{spec} in a simulated engine: {world.name}; {URGENT_SHARE:.0%} of the requests urgent, at {URGENT_PACE:g} of "
        "what a token takes without speculation",
        "draft length of urgent requests (and what their tokens are worth), by tokens ahead of their objective",
        "",
        f"{'requests':>8} {'others':>6}  " + " ".join(f"{name:>10}" for name in names),
    ]
    for stroke in strokes:
        cells = [
            "-" if length is None else f"{length:.1f}" + ("" if value is None else f" ({value:.1f})")
            for length, value in zip(stroke.lengths, stroke.values, strict=True)
        ]
        lines.append(f"{stroke.requests:8} {stroke.others_length:6.1f}  " + " ".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


@app.command()
def release(
    manifest: Annotated[Path, typer.Argument(help="Of a trained policy, as `faser train` leaves it.")],
    evaluation: Annotated[
        Path, typer.Option(help="What `faser evaluate --objectives --policies 'price learned:MANIFEST' -o FILE` wrote.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of policy.json; default: the installed one.")
    ] = None,
) -> None:
    """Make a trained policy the one that `learned` names, with its figures in the manifest."""
    from ...models.learned.learned import RELEASED
    from ...models.training.release import release as put_in_place

    try:
        found = json_module.loads(evaluation.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--evaluation {evaluation}: {error}", "the file that `faser evaluate --objectives -o` wrote"
        ) from None
    if not isinstance(found, dict):
        raise UsageError(f"--evaluation {evaluation}: {type(found).__name__}", "a JSON object")
    folder = output or RELEASED.parent
    require_folder(folder, "--output")
    path = put_in_place(manifest, found, folder)
    typer.echo(f"{path}: {json_module.loads(path.read_text())['results']}")


def _world(name: str) -> WorldSpec:
    from ...env.profile.engine_profile import SHIPPED, ProfileError, load_profile, shipped_profile
    from ...models.evaluation.worlds import WorldSpec, held_out

    known = {each.name: each for each in held_out()}
    if name in known:
        return known[name]
    if name in SHIPPED:
        return WorldSpec(name, "measured: `faser profile` on the embedded pair", shipped_profile(name))
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"world {name!r}", f"{', '.join((*SHIPPED, *known))} or a profile file")
    try:
        return WorldSpec(path.stem, f"measured: {path}", load_profile(path))
    except ProfileError as error:
        raise UsageError(f"world {name!r}: {error}", "a file that `faser profile` wrote") from None


def _manifest_of(spec: str) -> dict[str, Any]:
    """Return what a learned policy's manifest tells of its training; nothing for others."""
    from ...models.learned.learned import manifest_path
    from ...models.learned.network import HEAD, load_network

    name, _, path = spec.strip().partition(":")
    if name != "learned":
        return {}
    manifest = load_network(manifest_path(path)).manifest
    return {"manifest": {"head": HEAD, "sha256": manifest.sha256, "training": manifest.training,
                         "results": manifest.results}}  # fmt: skip


def _row(stroke: Stroke) -> dict[str, Any]:
    return {name: getattr(stroke, name) for name in stroke.__slots__}


def _in_short(value: Any) -> str:
    """Return a figure of a manifest for people."""
    if isinstance(value, list):
        return " to ".join(map(_in_short, value))
    if isinstance(value, dict):
        ratio, low, high = (value[name] for name in ("ratio", "low", "high"))
        return _in_short(ratio) if low is None else f"{_in_short(ratio)} ({_in_short(low)} to {_in_short(high)})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _text(spec: str, world: WorldSpec, told: dict[str, Any], strokes: list[Stroke]) -> str:
    lines = [f"{spec} in a simulated engine: {world.name} ({world.note})"]
    if told:
        training, results = told["manifest"]["training"], told["manifest"]["results"]
        lines.append(f"trained at commit {training.get('commit', '?')}, {training.get('steps', '?')} steps")
        lines += [f"  {name}: {_in_short(value)}" for name, value in results.items() if value is not None]
    lines.append("")
    k_max = len(strokes[0].shares) - 1
    lines.append(
        f"{'requests':>8} {'length':>7} {'accepted':>9} {'speed':>6} {'95 % interval':>14}  lengths 0..{k_max}, %"
    )
    for stroke in strokes:
        accepted = "-" if stroke.acceptance is None else f"{stroke.acceptance:.0%}"
        shares = " ".join(f"{share:4.0%}"[:-1].rjust(3) for share in stroke.shares)
        low, high = stroke.ratio_ci
        speed = f"{stroke.ratio:5.2f}x {low:6.2f} to {high:4.2f}"
        lines.append(f"{stroke.requests:8} {stroke.mean_length:7.2f} {accepted:>9} {speed}  {shares}")
    lines.append("")
    lines += [f"{stroke.requests:8} why: {stroke.reason}" for stroke in strokes]
    return "\n".join(lines)
