"""What a tour shows: its stations, the engine each of them needs, and what this machine cannot have.

Read by controller/demo/tour/tour.py. The order is that of the reader: first what costs least to understand. Starts
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ....models.embedded.pair import DRAFTER_CARD, EmbeddedPair
from ...engine.launch import EngineLaunch
from ...engine.serve import embedded_launch
from ..comparison import plain_launch

# float32: greedy tokens do not depend on who else is in a batch. Prompts are read anew at every station.
ARGUMENTS: Final = ("--dtype", "float32", "--max-num-batched-tokens", "512", "--no-enable-prefix-caching")
HEADS: Final = DRAFTER_CARD.with_name("exits.safetensors")
ALWAYS_PRUNED: Final = {"FASER_EXIT_HEADS": str(HEADS), "FASER_PRUNE": "always"}
ALWAYS_GROUPED: Final = {"FASER_PING_PONG": "always"}
RATIO: Final = "1:1"  # of cores, drafter to target
WHOLE, SPLIT, APART = "all cores", "split cores", "cores apart"  # the engines' names


@dataclass(frozen=True, slots=True)
class Station:
    """One way of drafting, forced.

    :param mechanisms: of models/forced/forced_policy.py
    :param engine: WHOLE, SPLIT or APART; what one of them has the others exclude
    :param beside: the station that drafts the same without it; empty: no speculation is that
    """

    name: str
    mechanisms: tuple[str, ...]
    engine: str
    beside: str = "drafts"
    note: str = ""  # what a reader must know of it

    @property
    def policy(self) -> str:
        """The policy that forces it."""
        return f"force:{'+'.join(self.mechanisms)}"


STATIONS: Final = (
    Station("drafts", ("drafts",), WHOLE, "", "the same length for all, drafted in turn"),
    Station("lengths", ("lengths",), WHOLE, note="each request's length by its own acceptance"),
    Station("stops", ("stops",), WHOLE, note="a draft ends where the drafter doubts"),
    Station("copies", ("copies",), WHOLE, "", "what followed the same words before; the drafter rests"),
    Station("pruning", ("pruning",), WHOLE, note="rows leave the target behind a layer that predicts their rejection"),
    Station("together", ("lengths", "stops", "copies", "pruning"), WHOLE, note="all of the above"),
    Station("groups", ("groups",), SPLIT, note="one half drafts while the other is verified, a core each"),
    Station("splits", ("splits",), SPLIT, note="two groups with a core each, and none on all cores, in turn"),
    Station(
        "together split", ("lengths", "stops", "copies", "splits"), SPLIT,
        note="where groups can be, nothing is pruned or drafted ahead",
    ),
    Station("drafts apart", ("drafts",), APART, "", "the drafter's core lies idle while nothing is drafted ahead"),
    Station("ahead", ("ahead",), APART, "drafts apart", "the next draft while this one is verified"),
    Station(
        "together apart", ("lengths", "stops", "ahead"), APART, "drafts apart",
        "a drafter's process makes no copies, and names no candidates to prune by",
    ),
)  # fmt: skip


def refusal(station: Station, cores: int) -> str:
    """Return why the station cannot be had on so many cores; empty if it can."""
    return "" if cores > 1 or station.engine == WHOLE else "one core; the drafter and the target need one each"


def engines_of(stations: Sequence[Station]) -> list[str]:
    """Return the engines to start, in the order of their first station."""
    return list(dict.fromkeys(station.engine for station in stations))


def tour_launch(engine: str, pair: EmbeddedPair, endpoint: str, cores: Sequence[int]) -> EngineLaunch:
    """Return the launch of one of the engines, with every gate held open.

    :param cores: of this machine that may be used
    """
    splits = RATIO if engine == SPLIT else ""
    launch = embedded_launch(pair, endpoint, arguments=ARGUMENTS, splits=splits)
    if engine != APART:
        gates = ALWAYS_GROUPED if splits else ALWAYS_PRUNED
        extra = {**launch.environment_extra, **gates}
        return replace(launch, threads=len(cores), environment_extra=extra)
    *targets, drafters = map(str, cores)
    settled = {
        "FASER_DRAFTER_CORES": drafters, "FASER_DRAFT_AHEAD": "always", "OMP_NUM_THREADS": str(len(targets)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(targets),
    }  # fmt: skip
    return replace(launch, environment_extra=settled)


def reference_launch(pair: EmbeddedPair, cores: Sequence[int]) -> EngineLaunch:
    """Return the launch of plain vLLM without speculation on all cores."""
    return replace(plain_launch(embedded_launch(pair, "", arguments=ARGUMENTS)), threads=len(cores))
