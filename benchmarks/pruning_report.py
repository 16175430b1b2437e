"""The measured tables of docs/pruning.md, made from the JSON files that pruning.py and pruning_shape.py write.

    python benchmarks/pruning_report.py

Rewrites what stands between the tables' markers, from the files alone; a table whose file is not there stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from faser.controller.bench_ratio import LEAST_RATIO, Ratio, envelope, paired_ratio, student_interval, wider_interval

ROOT: Final = Path(__file__).resolve().parent.parent
DOCUMENT: Final = ROOT / "docs" / "pruning.md"
TABLE_RESULT: Final = ROOT / "benchmarks" / "results" / "pruning.json"
WANTED_SAVING: Final = 0.2  # of a step, at 60 % of the drafts rejected, behind the middle layer
GATE_RESULT: Final = ROOT / "benchmarks" / "results" / "pruning_gate.json"
SHAPE_RESULT: Final = ROOT / "benchmarks" / "results" / "pruning_shape.json"
STAGES_RESULT: Final = ROOT / "benchmarks" / "results" / "pruning_stages.json"
WANTED_US: Final = 500.0  # compaction plus metadata
SUM: Final = "compaction and metadata together"
Result = dict[str, Any]


def shape_lines(result: Result) -> list[str]:
    """Return the table of the large shape: each cut beside the whole step and the step whose drafts ended in time."""
    options, machine = result["options"], result["machine"]
    rows = {(row["batch"], row["arm"], row["rejected"], row["layer"]): row for row in result["rows"]}
    cuts = [key for key in rows if key[1] == "cut"]
    cells = []
    for batch, _, rejected, layer in cuts:
        cut, full = rows[batch, "cut", rejected, layer], rows[batch, "full", 0.0, 0]
        ended, none = rows[batch, "ended", rejected, 0], rows[batch, "none", 0.0, 0]
        cells.append(
            (
                f"{batch}", f"{rejected:.0%}", f"{layer} of {options['layers']}", f"{none['step_ms']:.0f}",
                f"{full['step_ms']:.0f}", f"{cut['step_ms']:.0f}", f"{1.0 - cut['step_ms'] / full['step_ms']:.0%}",
                f"{ended['step_ms']:.0f}", f"{cut['score_ms']:.1f}", f"{cut['prune_ms'] - cut['score_ms']:.2f}",
            )
        )  # fmt: skip
    names = (
        "batch", "drafts rejected", "cut behind layer", "no drafts, ms", "in full, ms", "cut, ms", "shorter by",
        "ended beforehand, ms", "scoring, ms", "compacting and metadata, ms",
    )  # fmt: skip
    return [
        f"Random weights in the shape of an 8B Llama's layers, {options['layers']} of them, k = {options['length']}, "
        f"medians of {options['steps']} steps; {machine['cpu']}, one thread, CPU time.",
        "",
        *markdown(names, cells),
        "",
        shape_verdict(result),
    ]


def stages_lines(result: Result) -> list[str]:
    """Return the table of what happens between the two halves, and its sum beside the bar."""
    options, spent = result["options"], result["stages_us"]
    cells = [(stage, f"{value:.0f}") for stage, value in spent.items() if stage != SUM]
    others = "from the verdict to the layer behind the cut, thread CPU time"
    return [
        f"Batch {options['batches'][0]}, k = {options['length']}, {options['rejected'][0]:.0%} of the drafts rejected, "
        f"cut in the middle of {options['layers']} layers of width 4096; medians of {result['steps']} steps; "
        f"{result['machine']['cpu']}.",
        "",
        *markdown(("stage", "us"), cells),
        "",
        f"Compaction and metadata, {others}: {spent[SUM] / 1e3:.2f} ms, "
        f"{'within' if spent[SUM] <= WANTED_US else 'over'} the {WANTED_US / 1e3:g} ms that were asked for.",
    ]  # fmt: skip


def shape_verdict(result: Result) -> str:
    """Say in a sentence where the cut shortens the step by the bar, and where it does not pay at all."""
    full = {row["batch"]: row["step_ms"] for row in result["rows"] if row["arm"] == "full"}
    cuts = [row for row in result["rows"] if row["arm"] == "cut"]
    names = {
        id(row): f"batch {row['batch']}, {row['rejected']:.0%} rejected, layer {row['layer']}" for row in cuts
    }  # fmt: skip
    saved = {id(row): 1.0 - row["step_ms"] / full[row["batch"]] for row in cuts}
    large = [names[key] for key, share in saved.items() if share >= WANTED_SAVING]
    lost = [names[key] for key, share in saved.items() if share <= 0.0]
    lines = [f"Shorter by {WANTED_SAVING:.0%} or more: {'; '.join(large) or 'nowhere'}."]
    return " ".join([*lines, f"Longer: {'; '.join(lost)}."] if lost else lines)


def markdown(names: Sequence[str], cells: Iterable[Sequence[str]]) -> list[str]:
    """Return a table's lines."""
    lines = (names, ["---"] * len(names), *cells)
    return [f"| {' | '.join(line)} |" for line in lines]


def engine_lines(result: Result) -> list[str]:
    """Return the table of the embedded pair: every mode beside the better of drafts in full and drafts that end."""
    names = (
        "batch", "k", "mode", "step, ms", "tokens/s", "over the better of full and ended", "rows of drafts that leave",
        "looking and cutting, ms",
    )  # fmt: skip
    cells = [
        (
            f"{cell['batch']}", f"{cell['length']}", MODES[row["mode"]].format(**cell), f"{row['step_ms']:.0f}",
            f"{row['tokens_per_s']:.0f}", str(ratio_of(cell, row)) if row["mode"] in PRUNING else "",
            f"{row['dropped']:.0%}", f"{row['prune_ms']:.1f}",
        )
        for cell in result["cells"]
        for row in cell["rows"]
    ]  # fmt: skip
    said = result["settings"]
    gated = [cell for cell in result["cells"] if any(row["mode"] == "gate" for row in cell["rows"])]
    measured = {(cell["batch"], cell["length"]) for cell in gated}
    missing = [f"{batch} x {length}" for batch, length in GRID if (batch, length) not in measured]
    left = f" Not measured with the gate yet (batch x k): {', '.join(missing)}." if missing else ""
    return [
        f"{said['rounds']} turns of each mode, answers of {said['tokens']} tokens; {said['machine']['cpu']}.",
        "",
        *markdown(names, cells),
        "",
        verdict(result) + left,
    ]


def ratio_of(cell: Result, row: Result) -> Ratio:
    """Return a mode's tokens/s over those of the better rival, chosen on the other half of the rounds."""
    rates = {one["mode"]: np.array(one["turns_tokens_per_s"]) for one in cell["rows"]}
    arms = {name: rates[name] for name in (*RIVALS, row["mode"])}
    return envelope(arms, row["mode"], wider_interval).ratio


GRID: Final = [(batch, length) for batch in (4, 8, 16, 32) for length in (3, 7)]
RIVALS: Final = ("full", "confidence")
PRUNING: Final = ("pruned", "both", "gate", "oracle")
MODES: Final = {
    "none": "no drafts",
    "full": "in full",
    "confidence": "ended by confidence under {confidence:g}",
    "pruned": "pruned behind layer {layer} at {threshold:g}",
    "both": "both",
    "gate": "both, gate on",
    "oracle": "oracle behind layer {oracle_layer}",
}


def verdict(result: Result) -> str:
    """Say in a sentence where the trained heads win, and in another where the gate is below the bar, if it was on."""
    wins, falls, gated = [], [], []
    for cell in result["cells"]:
        for row in cell["rows"]:
            if row["mode"] not in PRUNING or row["mode"] == "oracle":
                continue
            ratio, name = ratio_of(cell, row), f"batch {cell['batch']}, k = {cell['length']}"
            if ratio.low > 1.0:
                wins.append(f"{name} ({MODES[row['mode']].format(**cell)})")
            if row["mode"] == "gate":
                gated.append(ratio.value)
                falls += [name] if ratio.value < LEAST_RATIO else []
    lines = [f"Beyond the interval pruning wins {'at ' + '; '.join(wins) if wins else 'nowhere'}."]
    if gated:
        where = f"under {LEAST_RATIO} at {'; '.join(falls)}" if falls else f"nowhere under {LEAST_RATIO}"
        together = f"; over these cells together {paired_ratio(np.log(gated), student_interval)}"
        lines.append(f"With the gate on it is {where}{together if len(gated) > 1 else ''}.")
    return " ".join(lines)


def gate_lines(result: Result) -> list[str]:
    """Return the table of the gate, beside the better of drafts in full and drafts that end."""
    said, cells, ratios = result["settings"], [], []
    for cell in result["cells"]:
        rates = {arm: np.array(values) for arm, values in cell["tokens_per_s"].items()}
        ratio = envelope(rates, "gate", wider_interval).ratio
        ratios.append(ratio)
        middle = {arm: f"{np.exp(np.log(values).mean()):.0f}" for arm, values in rates.items()}
        gain = cell["gain_seen_by_gate"]
        cells.append(
            (
                f"{cell['batch']}", f"{cell['length']}", f"{cell['confidence']:g}",
                middle.get("full", f"{cell['full_beforehand']:.2f} of the next column"), middle["confidence"],
                middle["gate"], str(ratio), f"{cell['looked']:.1%}", "" if gain is None else f"{gain:+.1%}",
            )
        )  # fmt: skip
    names = (
        "batch", "k", "drafts end under", "in full, tokens/s", "ended by confidence, tokens/s",
        "both, gate on, tokens/s", "gate over the better", "steps that pruned",
        "time per token that pruning saves, by the gate",
    )  # fmt: skip
    if not ratios:
        return ["Not measured yet."]
    low = min(ratio.value for ratio in ratios)
    wins = [f"batch {cell[0]}, k = {cell[1]}" for cell, ratio in zip(cells, ratios, strict=True) if ratio.low > 1.0]
    timed = sorted(cell["timed"] for cell in result["cells"])
    return [
        f"Each cell from {timed[0]} to {timed[-1]} timed steps; {said['machine']['cpu']}, "
        f"commit {', '.join(sorted({cell['commit'] for cell in result['cells']}))}.",
        "",
        *markdown(names, cells),
        "",
        f"Lowest: {low:.3f}, {'not under' if low >= LEAST_RATIO else 'under'} {LEAST_RATIO}; over the cells together "
        f"{paired_ratio(np.log([ratio.value for ratio in ratios]), student_interval)}. "
        f"Beyond the interval it wins {'at ' + '; '.join(wins) if wins else 'nowhere'}.",
    ]  # fmt: skip


PARTS: Final[tuple[tuple[str, Path, Callable[[Result], list[str]]], ...]] = (
    ("engine", TABLE_RESULT, engine_lines),
    ("gate", GATE_RESULT, gate_lines),
    ("shape", SHAPE_RESULT, shape_lines),
    ("stages", STAGES_RESULT, stages_lines),
)


def written(text: str, name: str, lines: Sequence[str]) -> str:
    """Return the document with these lines between the markers of a table."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return "\n".join([before + begin, "", *lines, "", end + after])


def write_tables() -> None:
    """Bring the document up to date with the files that are there."""
    text = DOCUMENT.read_text()
    for name, path, lines in PARTS:
        if path.is_file():
            text = written(text, name, lines(json.loads(path.read_text())))
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    write_tables()
