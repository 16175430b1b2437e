"""The constants of a simulation as arrays: profiles, acceptance, workloads, objectives. Shared by all its engines.

Built by env/simulator/scenario.py, read by the compiled kernel.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Floats, Ints, Singles

Records = npt.NDArray[np.void]

CELLS: Final = 256  # of a draft token's score, -4..4 standard deviations
SIGMOID_CELLS: Final = 1024  # of a logit, -12..12
NORMAL_CELLS: Final = 4096

LOGITS, VALUES, CHANCES = range(3)  # World.tables: confidence, acceptance (both logits), calibrated chance
PRICED, NAMED, RECORDED = range(3)  # lengths from the price, one for each slot, or from a recording

PROFILE: Final = np.dtype(
    [
        ("kv_blocks", np.int64),
        ("block_size", np.int64),
        ("token_budget", np.int64),
        ("most_requests", np.int64),
        ("most_context", np.int64),
        ("catch_up", np.int64),
        ("lookahead", np.int64),  # tokens beyond what is scheduled for which blocks are held
        ("splits", np.int64),
        ("is_adaptive", np.int64),  # drafts are made in full whatever a stop rule keeps of them
        ("saved", np.float64),  # share of the layers that a pruned row is spared; 0: no exit heads
        ("recall", np.float64),  # as engine_profile.Exit has them
        ("false_alarm", np.float64),
        ("look_s", np.float64),
        ("look_token_s", np.float64),
        ("ahead_ready", np.float64),  # as engine_profile.Ahead has them
        ("ahead_hidden", np.float64),
        ("ahead_verify", np.float64),  # 0: nothing can be drafted ahead
        ("ahead_acceptance", np.float64),
        ("noise_verify", np.float64),  # standard deviation of the log
        ("noise_draft", np.float64),
        ("noise_host", np.float64),
        ("request_share", np.float32),  # of the score, as a factor: the square root of the share of the variance
        ("token_share", np.float32),
        ("carry", np.float32),
        ("fresh", np.float32),  # sqrt(1 - carry^2)
        ("hidden", np.float32),
        ("match_longest", np.int64),  # as match_model.MatchModel has them; 0: nothing is copied
        ("match_after_whole", np.float32),
        ("match_after_other", np.float32),
        ("match_spread", np.float32),
        ("match_request_share", np.float32),  # factors, as above
        ("match_token_share", np.float32),
        ("match_carry", np.float32),
        ("match_fresh", np.float32),
        ("match_hidden", np.float32),
    ],
    align=True,
)
ROW: Final = np.dtype(
    [
        ("gap_s", np.float64),  # since the arrival before
        ("prompt", np.int32),
        ("output", np.int32),
        ("limit", np.int32),
        ("service", np.int32),
        ("ease", np.float32),  # shift of the request's level by what kind of prompt it is
    ],
    align=True,
)
_WHOLE = ("positions", "staleness", "mode", "own_rules", "repeats", "copies", "tells_objectives")
_REAL = (
    "noise", "discount_per_s", "good_weight", "token_weight", "request_weight", "waste_weight",
)  # fmt: skip
# Numbers that are the same for all engines; see env/simulator/scenario.py. own_rules: stop rules are set from outside.
# copies: where nobody says when, drafts are copied at the action's price. tells_objectives: requests say theirs.
SETTINGS: Final = np.dtype([*((name, np.int64) for name in _WHOLE), *((name, np.float64) for name in _REAL)])


class World(NamedTuple):
    """What does not change while engines run."""

    settings: Records  # (1,) of SETTINGS
    profiles: Records  # (profiles,) of PROFILE
    graphs: Floats  # (profiles, sizes) captured rows, ascending, filled up with 0
    splits: Floats  # (profiles, splits, 3) factor on verify, factor on draft, what groups hide
    tables: Singles  # (profiles, 3, positions, CELLS)
    match_tables: Singles  # (profiles, 2, 2, longest copy, CELLS), the second behind a whole copy; LOGITS and VALUES
    match_lengths: Floats  # (profiles, longest copy) share of the matches that offer at most 1, 2, ... tokens
    sigmoid: Singles  # (SIGMOID_CELLS,)
    normal: Singles  # (NORMAL_CELLS,) quantiles
    rows: Records  # (rows,) of ROW, all workloads one behind the other
    spans: Ints  # (workloads, 2) first row and one behind the last
    objectives: Floats  # (profiles, classes, 2) seconds to the first token, seconds per further token
    priority: Floats  # (classes,)
    offsets: Ints  # (requests + 1,) recorded draft lengths of the k-th request: decisions[offset:offset]
    decisions: npt.NDArray[np.int8]  # by tokens emitted; the last one holds on. ~length: pruned while verified
    told: Singles  # (decisions, positions) acceptance logits of what was drafted then, NaN: drawn; (0, positions): all


class RecordedDrafts(NamedTuple):
    """What the mode RECORDED replays; see World."""

    offsets: Ints
    decisions: npt.NDArray[np.int8]
    told: Singles


class Origins(NamedTuple):
    """What the beginning of an episode is drawn from; not needed by the kernel."""

    coefficients: Floats  # (profiles, terms of verify, draft and host), seconds per unit
    capacity: Floats  # (profiles, workloads) rate factor at which a full batch without speculation keeps up
    pace_s: Floats  # (profiles,) seconds of a full batch's step without speculation
