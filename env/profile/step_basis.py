"""What a step's time is made of: the terms of each phase, and compiled functions that fill them in.

Called by the simulator's kernel, by calibration (the same functions, for the fit) and by env/profile/engine_profile.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import numpy as np

from ...engine_adapter.arrays import Floats
from ...engine_adapter.compiled import compiled

Phase = Literal["verify", "draft", "host"]

# Seconds per row are not constant: small matrix products waste their tiles, large ones saturate the machine. One term
# per segment lets the cost of rows be any non-decreasing piecewise linear function.
ROW_EDGES: Final = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
FIRST_EDGES: Final = (0.0, 4.0, 16.0, 64.0, 256.0)
ROUND_EDGES: Final = (0.0, 4.0, 16.0, 64.0)


def segments(name: str, edges: tuple[float, ...]) -> tuple[str, ...]:
    """Return the names of the terms of a piecewise linear function, one per segment."""
    ends = (*(f"{edge:g}" for edge in edges[1:]), "")
    return tuple(f"{name} {start:g}..{end}" for start, end in zip(edges, ends, strict=True))


# Every coefficient is in seconds per unit of its term.
VERIFY_BASIS: Final = (
    "step",  # 1: launches, reading the weights, scheduling
    "requests",  # requests in the step: bookkeeping
    *segments("rows", ROW_EDGES),  # rows through the target, prompt rows included
    "sampled rows",  # rows through LM head and sampler
    "sampled rows 16..",
    "any drafts",  # 1 if draft tokens are verified: another sampler runs
    "draft tokens",  # verified draft tokens: rejection sampling
    "KV tokens",  # context of each request, summed: what attention reads
    "attended tokens",  # context of each decoding row, summed: what attention computes
    "prompts",  # requests that compute prompt
    "prompt tokens",  # prompt rows, beyond what a row costs anyway
    "attended prompt tokens",  # context of each prompt row, summed
)
DRAFT_BASIS: Final = (
    "step",  # 1: asking the drafter at all
    "kept rows",  # target rows whose states are kept for a later catch-up
    "first pass",  # 1 if the drafter's first pass runs
    *segments("first rows", FIRST_EDGES),  # rows of that pass: new tokens, prompts, missed tokens
    "drafting requests",  # LM head of the first round
    "further rounds",  # rounds behind the first
    *segments("further rows", ROUND_EDGES),  # rows of a further round, on average, times further rounds
    "attended tokens",  # context of each drafted token, summed
)
HOST_BASIS: Final = (
    "step",  # 1
    "requests",  # requests in the step: tokens handed out
    "arrivals",  # requests that arrived since the last step
)
BASES: Final[Mapping[Phase, tuple[str, ...]]] = {"verify": VERIFY_BASIS, "draft": DRAFT_BASIS, "host": HOST_BASIS}

_ROWS: Final = np.array(ROW_EDGES)
_FIRST: Final = np.array(FIRST_EDGES)
_ROUND: Final = np.array(ROUND_EDGES)


@compiled
def _fill_segments(out: Floats, at: int, edges: Floats, value: float, factor: float) -> int:
    last = len(edges) - 1
    for index in range(last):
        out[at + index] = factor * max(min(value, edges[index + 1]) - edges[index], 0.0)
    out[at + last] = factor * max(value - edges[last], 0.0)
    return at + last + 1


@compiled
def fill_verify_basis(
    out: Floats,
    requests: float,
    decode_rows: float,
    draft_tokens: float,
    prompts: float,
    prompt_tokens: float,
    sampled_rows: float,
    kv_tokens: float,
    attended_tokens: float,
    attended_prompt_tokens: float,
) -> None:
    """Fill `out` (len(VERIFY_BASIS),) for one step.

    :param requests: requests scheduled in the step
    :param decode_rows: rows of decoding requests, the sum of 1 + k
    :param draft_tokens: of these, draft tokens
    :param prompts: requests that compute prompt tokens in this step
    :param prompt_tokens: rows of those
    :param sampled_rows: decode_rows, and one for each prompt that ends in this step
    :param kv_tokens: computed tokens after the step, summed over requests
    :param attended_tokens: computed tokens of its request, summed over decode rows
    :param attended_prompt_tokens: the same over prompt rows: length * (start + (length + 1) / 2) of each chunk
    """
    out[0] = 1.0
    out[1] = requests
    at = _fill_segments(out, 2, _ROWS, decode_rows + prompt_tokens, 1.0)
    out[at] = sampled_rows
    out[at + 1] = max(sampled_rows - 16.0, 0.0)
    out[at + 2] = 1.0 if draft_tokens > 0.0 else 0.0
    out[at + 3] = draft_tokens
    out[at + 4] = kv_tokens
    out[at + 5] = attended_tokens
    out[at + 6] = prompts
    out[at + 7] = prompt_tokens
    out[at + 8] = attended_prompt_tokens


@compiled
def fill_cut_basis(
    out: Floats,
    scratch: Floats,
    pruned_rows: float,
    saved_share: float,
    requests: float,
    decode_rows: float,
    draft_tokens: float,
    prompts: float,
    prompt_tokens: float,
    sampled_rows: float,
    kv_tokens: float,
    attended_tokens: float,
    attended_prompt_tokens: float,
) -> None:
    """Fill `out` (len(VERIFY_BASIS),) for one step whose `pruned_rows` leave before the last share of the layers.

    A share of the layers sees all rows and the rest fewer; what follows the layers works on those that stayed.
    :param scratch: as long as `out`
    """
    left = decode_rows - pruned_rows
    sampled, drafts = sampled_rows - pruned_rows, max(draft_tokens - pruned_rows, 0.0)
    attended = attended_tokens * left / decode_rows if decode_rows > 0.0 else 0.0
    fill_verify_basis(
        out, requests, left, drafts, prompts, prompt_tokens, sampled, kv_tokens, attended, attended_prompt_tokens
    )
    if pruned_rows <= 0.0:
        return
    fill_verify_basis(
        scratch, requests, decode_rows, drafts, prompts, prompt_tokens, sampled, kv_tokens, attended_tokens,
        attended_prompt_tokens,
    )  # fmt: skip
    for t in range(len(VERIFY_BASIS)):
        out[t] = saved_share * out[t] + (1.0 - saved_share) * scratch[t]


@compiled
def fill_draft_basis(
    out: Floats,
    requests: float,
    rounds: float,
    draft_rows: float,
    first_rows: float,
    kept_rows: float,
    attended_tokens: float,
) -> None:
    """Fill `out` (len(DRAFT_BASIS),) for the drafting of one step.

    A request's part of `first_rows` is its context after the step less the tokens its drafter has computed before, so
    that prompts and tokens it sat out while it drafted nothing (catch-up) count by themselves.

    :param requests: requests that draft at least one token
    :param rounds: the longest draft, tokens
    :param draft_rows: tokens drafted, summed over requests
    :param first_rows: rows of the drafter's first pass
    :param kept_rows: rows that the target computed for requests outside that pass
    :param attended_tokens: context times tokens drafted, summed over requests
    """
    out[0] = 1.0
    out[1] = kept_rows
    out[2] = 1.0 if first_rows > 0.0 else 0.0
    at = _fill_segments(out, 3, _FIRST, first_rows, 1.0)
    out[at] = requests
    further = max(rounds - 1.0, 0.0)
    out[at + 1] = further
    mean = (draft_rows - requests) / further if further > 0.0 else 0.0
    at = _fill_segments(out, at + 2, _ROUND, mean, further)
    out[at] = attended_tokens


@compiled
def fill_host_basis(out: Floats, requests: float, arrivals: float) -> None:
    """Fill `out` (len(HOST_BASIS),) for the pause before a step that follows another one at once."""
    out[0] = 1.0
    out[1] = requests
    out[2] = arrivals


@compiled
def padded_rows(rows: float, graph_sizes: Floats) -> float:
    """Return the captured size that runs `rows` rows; as they are beyond the largest or without graphs."""
    padded = rows
    for size in graph_sizes[::-1]:
        if rows <= size:
            padded = size
    return padded
