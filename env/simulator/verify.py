"""The target's side of a step: which drafts are accepted or pruned, what is emitted, and the work it was; compiled.

Called by env/simulator/step.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ..vectorised import apart
from .constants import RECORDED
from .draft import recorded
from .schedule import GOLDEN, mixed, uniform
from .state import (
    ACCEPTED,
    COMPUTED,
    CONTEXT,
    EMITTED,
    ENDS,
    FINISHED,
    FIRST,
    FRESH,
    HANDLE,
    IS_PREFILL,
    LUCKY,
    MADE,
    OUTPUT,
    PROMPT,
    PRUNED,
    SCHEDULED,
    VERIFIED,
    Bytes,
    Column,
    Shorts,
    Words,
)

# A step's work: behind that of draft.py the parameters of fill_verify_basis and what is counted beside.
(
    REQUESTS, DECODE_ROWS, DRAFT_TOKENS, PROMPTS, PROMPT_TOKENS, SAMPLED, KV_TOKENS, ATTENDED, ATTENDED_PROMPT,
    ALL_PRUNED, ALL_FRESH, WASTED, WORK,
) = range(7, 20)  # fmt: skip
_PRUNE_KEY = np.uint64(0x5851F42D4C957F2D)


@apart
def verify(
    engine: Any, profile: Any, settings: Any, ints: Shorts, keys: Words, offsets: Ints, decisions: Bytes, work: Floats,
    notes: Shorts,
) -> None:  # fmt: skip
    """Run the target over what is scheduled: accept drafts, emit tokens, count the work.

    :param notes: (NOTES, slots) scratch
    """
    ends, made = notes[ENDS], notes[MADE]
    _accept(
        ints[PROMPT], ints[EMITTED], ints[COMPUTED], ints[SCHEDULED], ints[VERIFIED], ints[LUCKY], ints[ACCEPTED],
        ints[PRUNED], ends, made,
    )  # fmt: skip
    engine.looked = engine.wrongly_pruned = 0
    if profile.saved > 0.0 and (engine.prunes != 0 or settings.mode == RECORDED):
        _prune(engine, profile, settings, ints, keys, offsets, decisions, made)
    _advance(
        ints[SCHEDULED], ints[VERIFIED], ints[OUTPUT], ints[EMITTED], ints[COMPUTED], ints[CONTEXT], ints[FRESH],
        ints[FIRST], ints[IS_PREFILL], ints[FINISHED], ends, made,
    )  # fmt: skip
    _count_work(
        engine, ints[SCHEDULED], ints[VERIFIED], ints[ACCEPTED], ints[PRUNED], ints[FRESH], ints[CONTEXT],
        ints[COMPUTED], ints[IS_PREFILL], ends, work,
    )  # fmt: skip


@apart
def _accept(
    prompt: Column, emitted: Column, computed: Column, scheduled: Column, verified: Column, lucky: Column,
    accepted: Column, pruned: Column, ends: Column, made: Column,
) -> None:  # fmt: skip
    """Note which chunks reach the end of what is known, and so make a token of their own; accept lucky drafts."""
    for i in range(len(ends)):
        need, hits, rows = prompt[i] + emitted[i] - computed[i], min(lucky[i], verified[i]), scheduled[i]
        is_end = (rows > 0) & (rows - verified[i] == need)
        accepted[i], pruned[i], ends[i], made[i] = hits, 0, 1 if is_end else 0, hits + 1 if is_end else 0


@apart
def _advance(
    scheduled: Column, verified: Column, output: Column, emitted: Column, computed: Column, context: Column,
    fresh: Column, first: Column, is_prefill: Column, finished: Column, ends: Column, made: Column,
) -> None:  # fmt: skip
    """Emit what was made and move each request on; the column CONTEXT keeps what was computed before."""
    for i in range(len(ends)):
        rows, drafts, tokens, answer, start = scheduled[i], verified[i], made[i], emitted[i], computed[i]
        prefill_before, is_end = is_prefill[i], ends[i]
        prompts = 1 if (rows > drafts + 1) | (tokens == 0) else 0
        new = min(tokens, output[i] - answer)
        first[i] = 1 if (answer == 0) & (tokens > 0) else 0
        fresh[i], finished[i], context[i], emitted[i] = new, 0, start, answer + new
        is_prefill[i] = prompts if rows > 0 else prefill_before
        computed[i] = start + rows + (tokens - 1 - drafts if is_end != 0 else 0)


@apart
def _count_work(
    engine: Any, scheduled: Column, verified: Column, accepted: Column, pruned: Column, fresh: Column, context: Column,
    computed: Column, is_prefill: Column, ends: Column, work: Floats,
) -> None:  # fmt: skip
    """Sum up what a step computed."""
    requests = kv_tokens = all_fresh = drafts = wasted = all_pruned = 0
    for i in range(len(ends)):
        tokens, is_scheduled = computed[i], scheduled[i] > 0
        requests += 1 if is_scheduled else 0
        kv_tokens += tokens if is_scheduled else 0
        all_fresh += fresh[i]
        drafts += verified[i]
        wasted += verified[i] - accepted[i]
        all_pruned += pruned[i]
    prompts = prompt_tokens = sampled = rows = attended = attended_prompt = 0
    for i in range(len(ends)):
        all_rows, is_end = scheduled[i], ends[i]
        prompt_rows = all_rows if is_prefill[i] != 0 else 0
        prompts += 1 if prompt_rows > 0 else 0
        sampled += is_end if prompt_rows > 0 else 0
        rows += all_rows
        prompt_tokens += prompt_rows
        attended_prompt += prompt_rows * (2 * context[i] + prompt_rows + 1)
        attended += (all_rows - prompt_rows) * computed[i]
    engine.prefill_tokens, engine.decode_tokens, engine.draft_tokens = prompt_tokens, requests - prompts, drafts
    engine.drafted += drafts
    engine.accepted += drafts - wasted
    engine.emitted += all_fresh
    work[REQUESTS], work[DECODE_ROWS], work[DRAFT_TOKENS], work[PROMPTS] = (
        requests,
        rows - prompt_tokens,
        drafts,
        prompts,
    )
    work[PROMPT_TOKENS], work[SAMPLED], work[KV_TOKENS] = prompt_tokens, sampled + rows - prompt_tokens, kv_tokens
    work[ATTENDED], work[ATTENDED_PROMPT] = attended, 0.5 * attended_prompt
    work[ALL_PRUNED], work[ALL_FRESH], work[WASTED] = all_pruned, all_fresh, wasted


@apart
def _prune(
    engine: Any, profile: Any, settings: Any, ints: Shorts, keys: Words, offsets: Ints, decisions: Bytes, made: Column
) -> None:
    """Let exit heads look at the drafts; change what is accepted and made."""
    for i in range(ints.shape[1]):
        verified, emitted = ints[VERIFIED, i], ints[EMITTED, i]
        if verified == 0:
            continue
        if settings.mode == RECORDED and recorded(offsets, decisions, ints[HANDLE, i], emitted) >= 0:
            continue
        ints[ACCEPTED, i], made[i], ints[PRUNED, i] = _pruned(profile, keys[i], emitted, verified, ints[ACCEPTED, i])
        engine.looked += verified
        engine.wrongly_pruned += 1 if made[i] == ints[ACCEPTED, i] else 0


@apart
def _pruned(profile: Any, key: np.uint64, emitted: int, verified: int, hits: int) -> tuple[int, int, int]:
    """Prune one request's draft: (accepted, emitted, pruned tokens).

    A token that is pruned though it would be accepted is still tested by the row before it, and ends the step without
    a token of the target's own.
    """
    bits = mixed(key ^ (_PRUNE_KEY + np.uint64(emitted) * GOLDEN))
    quiet = 1.0 - profile.false_alarm
    luck, chance = uniform(bits), 1.0
    for j in range(hits):
        chance *= quiet
        if luck >= chance:
            return j + 1, j + 1, verified - j
    luck, chance = uniform(mixed(bits + GOLDEN)), 1.0
    for j in range(hits, verified):
        chance *= 1.0 - profile.recall
        if luck >= chance:
            return hits, hits + 1, verified - j
    return hits, hits + 1, 0
