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
SPLIT: Final = "1:1"  # drafter to target
WHOLE, APART = "all cores", "cores apart"  # the engines' names


@dataclass(frozen=True, slots=True)
class Station:
    """One way of drafting, forced.

    :param mechanisms: of models/forced/forced_policy.py
    :param engine: WHOLE or APART
    :param beside: the station that drafts the same without it; empty: no speculation
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
    Station("groups", ("groups",), WHOLE, note="one half drafts while the other is verified"),
    Station("splits", ("splits",), WHOLE, note="with two groups and without in turn"),
    Station(
        "together", ("lengths", "stops", "copies", "pruning", "splits"), WHOLE,
        note="all of the above; while groups are on nothing is pruned",
    ),
    Station("drafts apart", ("drafts",), APART, "", "the drafter's core lies idle while nothing is drafted ahead"),
    Station("ahead", ("ahead",), APART, "drafts apart", "the next draft while this one is verified"),
    Station(
        "together apart", ("lengths", "stops", "pruning", "ahead"), APART, "drafts apart",
        "copies and groups do not go with drafting ahead",
    ),
)  # fmt: skip
TWO_CORES: Final = frozenset({"groups", "splits", "ahead"})


def refusal(station: Station, cores: int) -> str:
    """Return why the station cannot be had on so many cores; empty if it can."""
    if cores > 1 or (station.engine == WHOLE and not TWO_CORES.intersection(station.mechanisms)):
        return ""
    return "one core; the drafter and the target need one each"


def engines_of(stations: Sequence[Station]) -> list[str]:
    """Return the engines to start, in the order of their first station."""
    return list(dict.fromkeys(station.engine for station in stations))


def tour_launch(engine: str, pair: EmbeddedPair, endpoint: str, cores: Sequence[int]) -> EngineLaunch:
    """Return the launch of one of the engines, with every gate held open.

    :param cores: of this machine that may be used
    """
    if engine == WHOLE:
        splits = SPLIT if len(cores) > 1 else ""
        launch = embedded_launch(pair, endpoint, arguments=ARGUMENTS, splits=splits)
        gates = ALWAYS_PRUNED | ({"FASER_PING_PONG": "always"} if splits else {})
        return replace(launch, environment_extra={**launch.environment_extra, **gates})
    *targets, drafters = map(str, cores)
    settled = {
        "FASER_DRAFTER_CORES": drafters, "FASER_DRAFT_AHEAD": "always", "OMP_NUM_THREADS": str(len(targets)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(targets),
    }  # fmt: skip
    launch = embedded_launch(pair, endpoint, arguments=ARGUMENTS)
    return replace(launch, environment_extra={**ALWAYS_PRUNED, **settled})


def reference_launch(pair: EmbeddedPair, cores: Sequence[int]) -> EngineLaunch:
    """Return the launch of plain vLLM without speculation on all cores."""
    return replace(plain_launch(embedded_launch(pair, "", arguments=ARGUMENTS)), threads=len(cores))
