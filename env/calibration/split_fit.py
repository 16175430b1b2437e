"""What splits of the device did in measured steps, as factors of each: both phases, and how much of them was hidden.

Called by env/calibration/profile_fit.py. Step costs come from steps in which drafter and target took turns on the whole
device; what is fitted here is by how much a group's steps under a split differ from what the same work takes there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ..cost.split_cost import SETTLE_STEPS
from ..profile.engine_profile import Split
from .step_fit import phase_level
from .step_samples import StepSamples

WHOLE, UNSETTLED = 0, -1
LEAST_STEPS = 20  # under a split, that verified and drafted


def settled(engine: Ints, split: Floats) -> Ints:
    """Return (n,) which split each step ran under; UNSETTLED around a change.

    Behind it drafts are from before it, and the last step under a split waits for both groups' drafts.

    :param engine: (n,) steps by engine, and then in its order
    :param split: (n,) as the records have it; NaN: none is offered
    """
    found = np.nan_to_num(split, nan=WHOLE).astype(np.int64)
    changes = np.flatnonzero((np.diff(found) != 0) & (np.diff(engine) == 0)) + 1
    found[changes[found[changes - 1] != WHOLE] - 1] = UNSETTLED
    for behind in range(SETTLE_STEPS):
        at = changes[changes + behind < len(found)] + behind
        found[at[engine[at] == engine[at - behind]]] = UNSETTLED
    return found


def fit_splits(
    samples: StepSamples, split: Ints, names: Sequence[str], verify: Floats, draft: Floats,
    graph_sizes: tuple[int, ...] = (), known: Sequence[Split] = (),
) -> tuple[tuple[Split, ...], list[str]]:  # fmt: skip
    """Return unsplit and every split of which enough was measured, or that is known; and a line for each of the others.

    :param samples: n steps
    :param split: (n,) of `names`, as `settled` returns it
    :param known: of a profile from before, which stay where too little was measured
    :param verify: coefficients of verifying, fitted to unsplit steps, and so `draft`
    """
    found, refused = [Split(names[WHOLE])], []
    for index, name in enumerate(names[1:], 1):
        decodes = (split == index) & (samples.prompt_tokens == 0.0) & (samples.draft_tokens > 0.0)
        decodes &= samples.drafting_requests > 0.0  # else there is nothing to hide
        own = samples.where(decodes & np.isfinite(samples.verify_s) & np.isfinite(samples.draft_s))
        if len(own) < LEAST_STEPS:
            found += [each for each in known if each.name == name]
            refused.append(f"split {name}: {len(own)} steps that verify and draft; expected {LEAST_STEPS} or more")
            continue
        shorter_s = float(np.minimum(own.verify_s, own.draft_s).sum())
        found.append(
            Split(
                name,
                verify_factor=phase_level(own, "verify", verify, graph_sizes),
                draft_factor=phase_level(own, "draft", draft),
                overlap=min(float(own.overlap_s.sum()) / shorter_s, 1.0),
            )
        )
    return tuple(found), refused
