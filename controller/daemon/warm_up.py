"""The decision core's kernels, compiled or read in before an engine waits for them.

Called by the daemon at its start, and by `make install`. The first start after an installation compiles, which takes
half a minute; machine code is then kept (engine_adapter/compiled.py).
"""

from __future__ import annotations

import logging
import threading
import time
from functools import cache
from typing import Final

from ...engine_adapter.protocol import MAX_DRAFT_LENGTH, RequestEvent, RequestRow, StepRecord
from ...env.estimate.engine_state import EngineState, learn
from ...env.spaces import Capabilities
from ...models.registry import make_policy
from ..decision.decide import LeaseTerms, decide
from ..decision.window import Window
from ..telemetry.packing import pack_lengths, pack_rows

logger = logging.getLogger(__name__)

STEPS: Final = 100  # until every estimate has been asked once, stop rules last
REQUESTS: Final = 4
DRAFTED: Final = 4  # tokens at most
PROMPT: Final = 64  # tokens, in one of the steps
WANTED_MS: Final = 10.0  # for each token, of who arrives in the second half: less than a step takes
ROWS: Final = 8192  # that the engine can verify
WORTH_TELLING_S: Final = 2.0
NOTICE: Final = "compiling the estimates, half a minute once after an installation; engines run on their defaults"


@cache
def warm_up(policy: str) -> float:
    """Let the policy decide on made-up records; return the seconds it took. Once per process and policy."""
    begun_s = time.monotonic()
    telling = threading.Timer(WORTH_TELLING_S, logger.info, (NOTICE,))
    telling.daemon = True
    telling.start()
    try:
        _decide_all(policy)
    finally:
        telling.cancel()
    return time.monotonic() - begun_s


def _decide_all(policy: str) -> None:
    capabilities = Capabilities(k_max=MAX_DRAFT_LENGTH, max_batched_tokens=ROWS)  # any policy can be made for these
    state, chooser = EngineState(capabilities), make_policy(policy, capabilities)
    window = Window(capabilities.k_max)
    for number in range(STEPS):
        decide(state, _record(number), chooser, LeaseTerms(), 1, number)
        if state.lesson is not None:
            window.add(state.lesson.record, state.lesson.told, is_under_lease=True, is_copy=state.lesson.is_copy)
            pack_rows(state.lesson.rows)
            pack_lengths([1], [2])
        learn(state)
    state.view().slack()
    state.unsplit_cost.confidence(REQUESTS)  # as the envelope watchdog asks
    state.unsplit_cost.verify_time_s(REQUESTS)
    if policy.partition(":")[0] == "learned":
        warm_up("price")  # it hands over to it


def _record(number: int) -> StepRecord:
    """Return a step in which requests draft, accept, come and go."""
    drafted = [(number + handle) % (DRAFTED + 1) for handle in range(REQUESTS)]
    rows = [_row(handle + number // 20, number, count) for handle, count in enumerate(drafted)]
    drafts, time_s = sum(drafted), 0.02 * number
    wanted_ms = WANTED_MS if number >= STEPS // 2 else None
    events = [
        RequestEvent("arrival", row.handle, time_s, 80, f"r{row.handle}", ttft_ms=wanted_ms, tpot_ms=wanted_ms)
        for row in rows
        if not number % 20
    ]
    events += [RequestEvent("first_token", row.handle, time_s, 1) for row in rows if not number % 20]
    if number == STEPS - 1:
        events += [RequestEvent(kind, rows[0].handle, time_s, 99) for kind in ("preempt", "finish")]
    return StepRecord(
        boot_id="warm-up", counter=number, step=number, time_s=time_s, step_s=0.02, schedule_s=1e-4, verify_s=0.015,
        sample_s=0.0, draft_s=0.004, overlap_s=0.0, adapter_s=0.0, running=REQUESTS, waiting=0,
        prefill_tokens=PROMPT if number == STEPS // 2 else 0,
        decode_tokens=REQUESTS, draft_tokens=drafts, kv_usage=0.1, split=None, frontier=None, lease_epoch=1,
        lease_sequence=number, dropped=0, rejected=0, events=events, rows=rows,
    )  # fmt: skip


def _row(handle: int, number: int, drafted: int) -> RequestRow:
    """Return a request of which the tokens are accepted that the drafter is sure of: so a stop rule is worth it."""
    sure = tuple(0.1 + 0.2 * ((handle + number // 5 + place) % 5) for place in range(drafted))
    accepted = next((place for place, chance in enumerate(sure) if chance < 0.5), drafted)
    return RequestRow(
        handle, 1 + drafted, drafted, drafted, drafted, 0, accepted, accepted + 1, 100 + number, False, sure
    )
