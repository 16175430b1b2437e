"""Results of closed_loop.py: their file, their statistics, and the table and picture made from them.

    python benchmarks/closed_loop_report.py [--json benchmarks/results/closed_loop.json] [--docs docs]

Rewrites the table in docs/results.md between its markers, and docs/closed_loop.svg, from the JSON file alone.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from faser.controller.bench_machine import Machine
from faser.controller.bench_plan import ARMS
from faser.controller.bench_ratio import (
    LEAST_LOW,
    LEAST_RATIO,
    OURS,
    WANTED_HALF_WIDTH,
    Envelope,
    Floats,
    Ratio,
    cleanest,
    paired_ratio,
)
from faser.controller.bench_result import name_of
from faser.controller.bench_table import Table as BatchLengths
from faser.controller.bench_table import described

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "closed_loop.json"
BEGIN, END = "<!-- closed loop: begin -->", "<!-- closed loop: end -->"
HEADING = "# Results\n"

Ints = npt.NDArray[np.int64]


class Settings(msgspec.Struct, frozen=True):
    """What must be the same for turns to be compared."""

    slice_s: float
    answers: int  # that were recorded, and are given over and over
    max_tokens: int
    max_prompt_tokens: int
    threads: int
    k_max: int
    policy: str
    target: str
    drafter_sha256: str
    core: int | None = None  # on which every engine's only thread stays; None: wherever the system puts it


class Turn(msgspec.Struct, frozen=True):
    """One arm's slices in a round of one load. Shares are of one core."""

    round: int
    load: int
    arm: str
    tokens_per_s: float
    seconds: float
    slices: int
    steps: int
    tokens: int
    requests: int  # begun
    draft_tokens: int  # vLLM's counters
    accepted_tokens: int
    engine_cpu: float
    own_cpu: float  # with the sidecar, and the steps that are not measured
    other_cpu: float
    steal_share: float  # of all cores' time
    is_disturbed: bool
    at: str
    prompt_tokens: int = 0  # read; 0 in all turns of a load of before it was counted
    start: int = 0  # which start of the engines
    first_steps_s: float = 0.0  # of its slices, together; 0 in turns of before they were told


class Results(msgspec.Struct):
    """The whole file; `commits` are those the code had when turns were added."""

    machine: Machine
    versions: dict[str, str]
    commits: list[str]
    settings: Settings
    turns: list[Turn] = []
    table: BatchLengths = ()  # vLLM's lengths by batch size, of the arm `table`

    def loads(self) -> list[int]:
        """Return the loads measured, ascending."""
        return sorted({turn.load for turn in self.turns})

    def arms(self) -> list[str]:
        """Return the arms measured, in the table's order."""
        return sorted({turn.arm for turn in self.turns}, key=ARMS.index)

    def starts(self, load: int | None = None) -> list[int]:
        """Return the starts of the engines in which there were turns, of a load if one is named, ascending."""
        return sorted({turn.start for turn in self.turns if load in (None, turn.load)})

    def start_of(self, load: int) -> Ints:
        """Return the start that each round of a load was in, (rounds,)."""
        starts = {turn.round: turn.start for turn in self.turns if turn.load == load}
        return np.array([starts.get(round_, 0) for round_ in range(1 + max(starts, default=-1))], np.int64)

    def rates(self, load: int, is_clean: bool = False, is_even: bool = False) -> dict[str, Floats]:
        """Return tokens/s by arm, (rounds,) each; NaN where an arm was not measured or, if asked for, disturbed.

        :param is_even: as if all arms had read as many prompt tokens in a round as they did on average
        """
        turns = [turn for turn in self.turns if turn.load == load]
        count = 1 + max((turn.round for turn in turns), default=-1)
        rates = {arm: np.full(count, np.nan) for arm in self.arms()}
        surplus_s = surplus(turns) if is_even else np.zeros(len(turns))
        for turn, more_s in zip(turns, surplus_s, strict=True):
            is_left_out = is_clean and turn.is_disturbed
            rates[turn.arm][turn.round] = np.nan if is_left_out else turn.tokens / (turn.seconds - more_s)
        return rates


def surplus(turns: Sequence[Turn]) -> Floats:
    """Return the seconds that each turn of one load took for prompts beyond those of its round's average arm.

    Which prompts fall on which side of a round's end depends on whose clients happen to be ahead; over a load every arm
    reads the same. The time of a prompt token is the slope of a regression with an effect of every arm and round.
    """
    prompts = np.array([turn.prompt_tokens for turn in turns], np.float64)
    places = [np.unique([getattr(turn, name) for turn in turns], return_inverse=True)[1] for name in ("arm", "round")]
    arms, rounds = (np.eye(place.max(initial=0) + 1)[place] for place in places)
    if len(turns) <= arms.shape[1] + rounds.shape[1]:
        return np.zeros(len(turns))
    seconds = np.array([turn.seconds for turn in turns])
    slope_s = float(np.linalg.lstsq(np.column_stack([prompts, arms, rounds]), seconds)[0][0])
    means = (rounds.T @ prompts) / rounds.sum(axis=0)
    return max(slope_s, 0.0) * (prompts - means[places[1]])


def read_results(path: Path) -> Results:
    """Read the file; msgspec's errors name the field."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def write_results(results: msgspec.Struct, path: Path) -> None:
    """Replace the file at once: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    part.replace(path)


def by_start(rates: dict[str, Floats], starts: Ints) -> dict[str, Floats]:
    """Return a rate for each start of the engines, in units of FASER's own, geometric means over its rounds.

    What differs between two processes of one kind stays for as long as they live: rounds of one start do not tell of
    it. With a single start the rounds are all there is.
    """
    places = np.unique(starts)
    if len(places) < 2 or OURS not in rates:
        return rates
    logs = {arm: np.log(rate) - np.log(rates[OURS]) for arm, rate in rates.items()}
    return {arm: np.exp([_mean(log[starts == place]) for place in places]) for arm, log in logs.items()}


def _mean(values: Floats) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else math.nan


def _compared(results: Results, load: int, is_clean: bool) -> dict[str, Floats]:
    return by_start(results.rates(load, is_clean, is_even=True), results.start_of(load))


def envelope_at(results: Results, load: int) -> Envelope:
    """Return the envelope ratio at a load, from undisturbed turns if there are enough of them."""
    return cleanest(_compared(results, load, is_clean=True), _compared(results, load, is_clean=False))


def over_none(results: Results, load: int) -> Ratio:
    """Return FASER over no speculation at a load, from the same turns as the envelope."""
    rates = _compared(results, load, is_clean=not envelope_at(results, load).is_disturbed)
    return paired_ratio(np.log(rates[OURS]) - np.log(rates["none"]))


def table_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return the table's heading and its rows, one per load."""
    arms, has_ratio = results.arms(), OURS in results.arms()
    heading = ["requests", *(name_of(arm) for arm in arms)]
    if has_ratio:
        pairs = "starts" if len(results.starts()) > 1 else "pairs"
        heading += ["FASER's length", "over none", "over the best rival", "rival", pairs, "bar"]
    return heading, [_row(results, load, arms, has_ratio) for load in results.loads()]


def _row(results: Results, load: int, arms: Sequence[str], has_ratio: bool) -> list[str]:
    rates = results.rates(load)
    row = [str(load), *(_spread(rates[arm]) for arm in arms)]
    if not has_ratio:
        return row
    best = envelope_at(results, load)
    rivals = " / ".join(dict.fromkeys(name_of(arm) for arm in best.rivals))
    verdict = "met" if best.ratio.meets_envelope() else "missed" if best.ratio.is_sharp() else "open"
    over = str(over_none(results, load)) if "none" in arms else ""
    pairs = f"{best.ratio.pairs}{' *' if best.is_disturbed else ''}"
    return [*row, f"{mean_length(results, load):.2f}", over, str(best.ratio), rivals, pairs, verdict]


def _spread(rates: Floats) -> str:
    rates = rates[~np.isnan(rates)]
    if not len(rates):
        return ""
    return f"{np.median(rates):.0f} ({rates.min():.0f} to {rates.max():.0f})"


def mean_length(results: Results, load: int, arm: str = OURS) -> float:
    """Return the draft tokens verified per token that no draft gave, i.e. per request and step."""
    turns = [turn for turn in results.turns if turn.load == load and turn.arm == arm]
    own = sum(turn.tokens - turn.accepted_tokens for turn in turns)
    return sum(turn.draft_tokens for turn in turns) / own if own > 0 else math.nan


def markdown(results: Results) -> str:
    """Return the section for docs/results.md."""
    heading, rows = table_rows(results)
    lines = [f"| {' | '.join(cells)} |" for cells in (heading, ["--:"] * len(heading), *rows)]
    return "\n".join([BEGIN, "## Closed loop", "", *_conditions(results), "", *lines, "", *_legend(results), END, ""])


def _conditions(results: Results) -> list[str]:
    machine, settings = results.machine, results.settings
    low_s, high_s = np.percentile([turn.seconds / turn.slices for turn in results.turns], [5, 95])
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return [
        f"{settings.target} on {machine.name}, {machine.cores} cores, {settings.threads} of them for the engine's",
        f"threads; {versions};",
        f"commit {', '.join(results.commits)}; drafter sha256 {settings.drafter_sha256[:12]}.",
        f"Each of N clients sends its next held-out prompt when its {settings.max_tokens}-token answer is done;",
        "the first answers are staggered. Greedy, the five kinds of prompts in turn, the same stream for every arm;",
        f"all are held to the same {settings.answers} answers, recorded before, lest the easier text win.",
        "Every arm is a vLLM engine in a process of its own, FASER's with its sidecar beside it; they take turns in",
        f"slices of {low_s:.1f} to {high_s:.1f} s, each serving as many tokens as the others; those that wait use no",
        "time, and FASER's lease outlives their wait." + _pinned(settings),
        f"Policy: {settings.policy}, longest draft {settings.k_max}." + _table(results),
        "",
        "![tokens/s relative to no speculation](closed_loop.svg)",
    ]


def _pinned(settings: Settings) -> str:
    return "" if settings.core is None else f" Every engine's thread stays on core {settings.core}."


def _table(results: Results) -> str:
    return f" The best table: {described(results.table)}." if "table" in results.arms() else ""


def _legend(results: Results) -> list[str]:
    disturbed = sum(turn.is_disturbed for turn in results.turns)
    return [
        "Tokens/s: median (lowest to highest) over rounds. *FASER's length*: draft tokens verified per request and",
        "step. Ratios: of rounds in which all arms read as many prompt tokens (a regression's slope takes out the time",
        "of prompts beyond the round's average; over a load all arms read the same). " + _intervals(results),
        f"*Bar*: ratio at least {LEAST_RATIO}, lower end at least {LEAST_LOW}, half-width at most "
        f"{WANTED_HALF_WIDTH:.0%}; *open*: the interval is still wider.",
        f"{len(results.turns)} rounds of an arm, {disturbed} of them disturbed by other work or stolen time and left",
        "out; * marks loads that use such rounds." + _uncounted(results),
        "Reproduce: `python benchmarks/closed_loop.py --docs docs`.",
        "",
    ]


def _intervals(results: Results) -> str:
    count = len(results.starts())
    pair, place = ("rounds", "round") if count < 2 else ("starts", "start")
    told = "Geometric mean over paired rounds with its 95 % interval."
    if count > 1:
        told = (
            f"All engines were started anew {count} times: what differs between two processes of one kind stays for\n"
            "as long as they live. Geometric means over a start's rounds, and over starts with their 95 % interval."
        )
    return (
        f"{told}\nThe best rival is chosen on every other {place} and compared on the {pair} between, and the other\n"
        f"way round, among arms that were in half of the {pair} at least: after the first {pair} arms that fall\n"
        "behind are left out." + _first_steps(results)
    )


def _first_steps(results: Results) -> str:
    """Return what a slice's first step takes beyond its others, by arm, where that was told."""
    told = []
    for arm in ("none", OURS):
        turns = [turn for turn in results.turns if turn.arm == arm and turn.first_steps_s and turn.steps > turn.slices]
        if turns:
            first_s = sum(turn.first_steps_s for turn in turns) / sum(turn.slices for turn in turns)
            others_s = sum(turn.seconds - turn.first_steps_s for turn in turns)
            other_s = others_s / sum(turn.steps - turn.slices for turn in turns)
            told.append(f"{(first_s - other_s) * 1e3:+.1f} ms ({name_of(arm)})")
    if not told:
        return ""
    return f"\nA slice's first step, behind the others' turns, took {' and '.join(told)} beyond its others."


def _uncounted(results: Results) -> str:
    loads = [load for load in results.loads() if not any(t.prompt_tokens for t in results.turns if t.load == load)]
    return f" Prompt tokens were not counted yet at {', '.join(map(str, loads))} requests." if loads else ""


def write_markdown(results: Results, path: Path) -> None:
    """Put the section between its markers in the file, or at its end."""
    text = path.read_text() if path.exists() else HEADING
    if BEGIN in text and END in text:
        before, after = text.split(BEGIN)[0], text.split(END)[1].removeprefix("\n")
    else:
        before, after = text.rstrip("\n") + "\n\n", ""
    path.write_text(before + markdown(results) + after)


def write_picture(results: Results, path: Path) -> None:
    """Draw each arm's tokens/s over the load, relative to no speculation (else to the first arm)."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    loads, arms = results.loads(), results.arms()
    base = "none" if "none" in arms else arms[0]
    figure = Figure(figsize=(7.0, 3.4), layout="constrained")
    axes = figure.add_subplot()
    for arm in arms:
        ratios = [paired_ratio(np.log(rates[arm]) - np.log(rates[base])) for rates in map(results.rates, loads)]
        values = np.array([ratio.value for ratio in ratios])
        reach = np.array([[r.value - r.low for r in ratios], [r.high - r.value for r in ratios]])
        style = {"color": "black", "linewidth": 2.2, "zorder": 5} if arm == OURS else {"linewidth": 1.2}
        axes.errorbar(
            loads, values, np.nan_to_num(reach), marker="o", markersize=3.5, capsize=2, label=name_of(arm), **style
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.set_xlabel("concurrent requests")
    axes.set_ylabel(f"tokens/s over {name_of(base)}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    with rc_context({"svg.hashsalt": "closed_loop"}):
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def write_documents(results: Results, docs: Path) -> None:
    """Write table and picture."""
    docs.mkdir(parents=True, exist_ok=True)
    write_markdown(results, docs / "results.md")
    write_picture(results, docs / "closed_loop.svg")


def main() -> None:
    """Write the documents anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    options = parser.parse_args()
    if not options.json.exists():
        print(f"closed_loop_report: no results at {options.json}; run benchmarks/closed_loop.py first")
        return
    write_documents(read_results(options.json), options.docs)
    print(f"closed_loop_report: wrote {options.docs / 'results.md'} and closed_loop.svg")


if __name__ == "__main__":
    main()
