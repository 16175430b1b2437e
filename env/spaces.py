"""What an engine can do and what a policy may ask for: the one definition of the action layout and its clamps.

Called by policies, the decision core and the simulator. An action that cannot be had never leaves `clamp`;
nothing here reads a clock, a file or a random source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from ..engine_adapter.arrays import Bools
from ..engine_adapter.compiled import compiled
from ..engine_adapter.protocol import (
    LARGEST_NUMBER,
    RAGGED,
    Admission,
    Hello,
    MatchRule,
    Prune,
    Rest,
    Stages,
    StopRule,
)
from ..engine_adapter.steering.stop_rule import fitted

Lengths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What one engine can be asked for. Sizes in tokens unless said otherwise; 0 means "not known"."""

    k_max: int
    max_requests: int = 256
    graph_sizes: tuple[int, ...] = ()  # captured token counts, ascending; empty: eager, any size
    graph_lengths: tuple[int, ...] = ()  # lengths with a full graph, in a batch of their own; empty: all cost alike
    splits: tuple[str, ...] = ("unsplit",)  # index 0 is unsplit
    exit_layers: tuple[int, ...] = ()  # layers with an exit head; empty: no pruning
    released_prune: Prune | None = None  # where and from what threshold on the exit heads were released to prune
    default_length: int = 0
    default_table: tuple[tuple[int, int, int], ...] = ()  # (first, last, length) by batch size
    lease_steps: int = 32
    lease_ms: int = 1000
    device: str = "cpu"
    is_async: bool = False
    max_batched_tokens: int = 0
    kv_tokens: int = 0
    frontier: int = 0  # most tokens that can be drafted ahead of a chunk
    copy_max: int = 0  # longest draft copied from a request's own text; 0: none is
    is_adaptive: bool = False  # of what is drafted, the engine verifies what pays
    is_ragged: bool = True  # a request's own length saves drafting; False: all draft the batch's longest
    stages: Stages | None = None  # of its pipeline, as at its start; None: they cannot move
    rest_steps: int = 0  # most steps in a row that a request can be left out of; 0: none

    @classmethod
    def from_hello(cls, hello: Hello) -> Capabilities:
        """Return the capabilities an engine introduced itself with."""
        return cls(
            k_max=hello.k_max,
            max_requests=hello.max_requests,
            graph_sizes=tuple(sorted({size for size in hello.graph_sizes if size > 0})),
            graph_lengths=tuple(sorted(set(hello.graph_lengths))),
            splits=tuple(hello.splits),
            exit_layers=tuple(sorted(set(hello.exit_layers))),
            released_prune=hello.released_prune,
            default_length=min(hello.default_length, hello.k_max),
            default_table=tuple((first, last, length) for first, last, length in hello.default_table),
            lease_steps=hello.lease_steps,
            lease_ms=hello.lease_ms,
            device=hello.device,
            is_async=hello.is_async,
            max_batched_tokens=hello.max_batched_tokens,
            kv_tokens=hello.kv_tokens,
            frontier=hello.frontier,
            is_adaptive=hello.is_adaptive,
            copy_max=hello.copy_max,
            is_ragged=hello.rounds == RAGGED,
            stages=hello.stages,
            rest_steps=hello.rest_steps,
        )


class Action(msgspec.Struct, frozen=True):
    """What a policy asks for from the next step on. None means "no opinion"."""

    lengths: Lengths  # (n,) int64, draft tokens; aligned with EngineState.handles()
    default_length: int  # draft tokens of requests that are not in `lengths`
    price: float | None = None  # seconds of step time one expected token must save
    split: int | None = None  # index into Capabilities.splits
    frontier: int | None = None  # most draft tokens per request that are drafted ahead
    prune: Prune | None = None
    stop: StopRule | None = None  # ends drafts on confidence, within the lengths
    admission: Admission | None = None  # what adaptive verification reckons with; None: the engine's own numbers
    match: MatchRule | None = None  # when a draft is copied in place of a drafter's
    reason: str = ""
    favours: bool = False  # some requests' objectives over tokens per second
    stage_bounds: tuple[int, ...] | None = None  # where the pipeline is to be cut
    rest: Rest | None = None  # who is left out of steps


def clamp(action: Action, capabilities: Capabilities) -> Action:
    """Return the nearest action that the engine can run; what cannot be had becomes "no opinion".

    An action with nothing to clamp is returned as it is, so that the usual one costs no copy.
    """
    k_max, default = capabilities.k_max, action.default_length
    if not isinstance(default, int):
        default = int(clamp_lengths(np.array([default]), k_max)[0])
    default = min(max(default, 0), k_max)
    lengths, price = clamp_lengths(action.lengths, k_max), _finite_or_none(action.price)
    split = _index_or_none(action.split, len(capabilities.splits) - 1)
    frontier = _index_or_none(action.frontier, capabilities.frontier)
    prune, stop = _prune_or_none(action.prune, capabilities.exit_layers), _stop_or_none(action.stop, capabilities)
    admission = action.admission if capabilities.is_adaptive else None
    match = _match_or_none(action.match, capabilities)
    bounds, rest = _bounds_or_none(action.stage_bounds, capabilities.stages), _rest_or_none(action.rest, capabilities)
    if (
        lengths is action.lengths and default is action.default_length and price is action.price
        and split is action.split and frontier is action.frontier and prune is action.prune and stop is action.stop
        and admission is action.admission and match is action.match and bounds is action.stage_bounds
        and rest is action.rest
    ):  # fmt: skip
        return action
    return Action(
        lengths, default, price, split, frontier, prune, stop, admission, match, action.reason, action.favours, bounds,
        rest,
    )  # fmt: skip


def is_other(asked: Action, given: Action) -> bool:
    """Return whether an action means something else than another: 2 is 2.0, but 2.4 is not 2."""
    is_same = np.array_equal(asked.lengths, given.lengths)
    is_same &= np.array_equal(asked.default_length, given.default_length)
    names = ("price", "split", "frontier", "prune", "stop", "match", "stage_bounds", "rest")
    return not is_same or any(getattr(asked, name) != getattr(given, name) for name in names)


def clamp_lengths(lengths: npt.ArrayLike | None, k_max: int) -> Lengths:
    """Return whole draft lengths in 0..k_max; NaN, None and minus infinity become 0, infinity k_max.

    An array of such lengths is returned as it is.
    """
    raw = np.asarray([] if lengths is None else lengths)
    if raw.dtype == np.int64 and raw.ndim == 1 and raw.flags.carray and _are_within(raw, k_max):
        return raw
    if raw.dtype.kind not in "iub":
        raw = np.rint(np.nan_to_num(raw.astype(np.float64), nan=0.0, posinf=k_max, neginf=0.0))
    whole: Lengths = np.minimum(np.maximum(raw, 0), k_max).astype(np.int64, copy=False).reshape(-1)
    return whole


def fit_rows(lengths: Lengths, max_rows: int, in_batch: Bools) -> Lengths:
    """Return lengths whose verify batch, 1 + k rows per request of it, fits in `max_rows` (0: no limit).

    The deepest requests give first. Without this the scheduler would leave whole requests out of the step.

    :param in_batch: (n,) who has rows in the next step; those who wait take none, however many they are
    """
    within = lengths[in_batch]
    spare = max_rows - len(within)
    if max_rows <= 0 or _total(within) <= spare:
        return lengths
    if spare <= 0:
        return np.zeros_like(lengths)
    caps = np.arange(int(within.max()) + 1)
    totals = np.minimum(within[:, None], caps).sum(axis=0)
    fitting: Lengths = np.minimum(lengths, caps[totals <= spare][-1])
    return fitting


def _finite_or_none(value: float | None) -> float | None:
    return float(value) if value is not None and abs(value) <= LARGEST_NUMBER else None


def _index_or_none(value: int | None, highest: int) -> int | None:
    return int(value) if value is not None and math.isfinite(value) and 0 <= value <= highest else None


def _prune_or_none(prune: Prune | None, exit_layers: tuple[int, ...]) -> Prune | None:
    if prune is None or prune.layer not in exit_layers or not 0.0 <= prune.threshold <= 1.0:
        return None
    return prune


def _bounds_or_none(bounds: tuple[int, ...] | None, stages: Stages | None) -> tuple[int, ...] | None:
    if bounds is None or stages is None or len(bounds) != len(stages.bounds):
        return None
    is_whole = all(isinstance(bound, int) for bound in bounds)
    edges = [0, *bounds, stages.layers]
    return bounds if is_whole and edges == sorted(edges) else None


def _rest_or_none(rest: Rest | None, capabilities: Capabilities) -> Rest | None:
    if rest is None or not capabilities.rest_steps or not rest.handles or rest.steps < 1:
        return None
    if rest.steps <= capabilities.rest_steps:
        return rest
    return msgspec.structs.replace(rest, steps=capabilities.rest_steps)


def _match_or_none(match: MatchRule | None, capabilities: Capabilities) -> MatchRule | None:
    if match is None or not capabilities.copy_max:
        return None
    numbers = match.numbers()
    is_sound = all(map(math.isfinite, numbers)) and max(map(abs, numbers)) <= LARGEST_NUMBER
    is_sound &= all((match.slopes, match.intercepts, match.keep)) and 0 <= match.most <= capabilities.copy_max
    is_sound &= len(match.handles) == len(match.weights) and all(1e-3 <= weight <= 1e3 for weight in match.weights)
    return match if is_sound and match.fewest >= 0 else None


def _stop_or_none(stop: StopRule | None, capabilities: Capabilities) -> StopRule | None:
    """With steps in flight the next one is scheduled at full length before this one's draft ends."""
    if stop is None or capabilities.k_max == 0 or capabilities.is_async:
        return None
    lists = (stop.slopes, stop.intercepts, stop.keep, stop.go_on)
    if not all(lists):
        return None
    sizes = list(map(abs, stop.numbers()))
    if not max(sizes) <= LARGEST_NUMBER or math.isnan(sum(sizes)):
        return None
    k_max, survivals = capabilities.k_max, stop.keep + stop.go_on
    if set(map(len, lists)) == {k_max} and min(survivals) >= 0.0 and max(survivals) <= 1.0:
        return stop
    keep, go_on = ([min(max(value, 0.0), 1.0) for value in values] for values in (stop.keep, stop.go_on))
    return fitted(StopRule(stop.slopes, stop.intercepts, keep, go_on), k_max)


@compiled
def _are_within(lengths: Lengths, k_max: int) -> bool:
    are_within = True
    for i in range(len(lengths)):
        are_within &= lengths[i] >= 0 and lengths[i] <= k_max
    return are_within


@compiled
def _total(lengths: Lengths) -> int:
    total = 0
    for i in range(len(lengths)):
        total += lengths[i]
    return total
