"""The loops behind env/estimate/requests.py, compiled: reading a record's rows, taking them in, closing gaps.

They use nothing of other files, because numba's cache looks at this one only; so the columns are named here. A live
request is a column of `table`, (FIELDS, capacity), and of `evidence`, (2, capacity, k_max): the first `size` count.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.compiled import compiled

# Rows of StepRows.told: the numbers of protocol.RequestRow in its order.
ROW_HANDLE, ROW_SCHEDULED, ROW_LIMIT, ROW_DRAFTED, ROW_VERIFIED = range(5)
ROW_PRUNED, ROW_ACCEPTED, ROW_EMITTED, ROW_CONTEXT, ROW_IS_PREFILL = range(5, 10)
NUMBERS = ROW_CONFIDENCES = 10  # behind them: how many confidences
LEAST_ROW_BYTES = 12

FIELDS = 11
(
    HANDLE,
    SEEN,  # number of the last record with a row of this request; -1: none yet
    BORN,  # number of the record in which it appeared
    CONTEXT,  # tokens
    DRAFTER,  # tokens of it that the drafter has seen, if it skips where nothing is drafted
    EMITTED,  # tokens
    LIMIT,  # draft length in force when the draft that waits for verification was made
    PRIORITY,
    MOST,  # longest draft that its client allows
    IS_PREFILL,
    IS_PREEMPTED,
) = range(FIELDS)

# Rows of `times`, (TIMES, capacity), seconds; infinite where unknown, or where nobody wants it so.
TIMES = 4
ARRIVED, FIRST_TOKEN, TTFT, TPOT = range(TIMES)  # on the engine's clock; and what is wanted, per token the last

MANY = 1 << 32  # tokens: more in one row is nonsense and must not overflow a sum


@compiled
def read_rows(
    frame: npt.NDArray[np.uint8], is_bounded: bool, most: int, longest: int, largest: int
) -> tuple[Ints, Floats, bool, int]:
    """Return a step's rows from their msgpack, as msgspec writes them, and where they end in it.

    The numbers and how many confidences each row has, (NUMBERS + 1, n); all of those in a line; whether 32 bits hold
    them exactly. Anything but rows ends beyond the frame, and nothing is read there; so does, with `is_bounded`, what
    is beyond the bounds of protocol.StepRecord: `most` rows, `longest` draft, `largest` number.
    """
    many, at = _header(frame, 0)
    n = many if LEAST_ROW_BYTES * many <= len(frame) and (many <= most or not is_bounded) else 0
    told, values = np.zeros((NUMBERS + 1, n), np.int64), np.empty(len(frame) // 9 + 1)
    is_read, is_single, size = n == many, True, 0
    for i in range(n):
        fields, at = _header(frame, at)
        is_read = is_read and fields == NUMBERS + 1
        for j in range(NUMBERS):
            is_read = is_read and (not is_bounded or _is_truth(frame, at) == (j == ROW_IS_PREFILL))
            told[j, i], at = _number(frame, at)
            is_read = is_read and (not is_bounded or _is_within(told[j, i], j, longest, largest))
        count, at = _header(frame, at)
        if not is_read or at + 9 * count > len(frame) or (is_bounded and count > longest):
            return told, values[:0].copy(), is_single, len(frame) + 1
        told[ROW_CONFIDENCES, i] = count
        for _ in range(count):
            value = np.uint64(_bits(frame, at + 1)).view(np.float64)
            is_read = is_read and bool(frame[at] == 0xCB) and (not is_bounded or bool(0.0 <= value <= 1.0))
            is_single = is_single and bool(np.float64(np.float32(value)) == value)
            values[size] = value
            at, size = at + 9, size + 1
    return told, values[:size].copy(), is_single, at if is_read else len(frame) + 1


@compiled
def _is_truth(frame: npt.NDArray[np.uint8], at: int) -> bool:
    return at < len(frame) and (frame[at] == 0xC2 or frame[at] == 0xC3)


@compiled
def _is_within(value: int, j: int, longest: int, largest: int) -> bool:
    most = longest if ROW_LIMIT <= j <= ROW_ACCEPTED else largest
    return (1 if j == ROW_HANDLE else 0) <= value <= most


@compiled
def _number(frame: npt.NDArray[np.uint8], at: int) -> tuple[int, int]:
    """Return the integer or truth value at this place, and where the next one begins; beyond the frame if none is."""
    end = len(frame)
    if at >= end:
        return 0, end + 1
    code = int(frame[at])
    if code < 0x80:
        return code, at + 1
    if code >= 0xE0:
        return code - 0x100, at + 1
    if code in (0xC2, 0xC3):
        return code - 0xC2, at + 1
    width = 1 << (code & 3)  # CC..CF: unsigned, D0..D3: signed; each family doubles
    if not 0xCC <= code <= 0xD3 or at + width >= end:
        return 0, end + 1
    value = 0
    for place in range(at + 1, at + 1 + width):
        value = (value << 8) | int(frame[place])
    if code >= 0xD0 and width < 8 and value >> (8 * width - 1) != 0:
        value -= 1 << (8 * width)
    return value, at + 1 + width


@compiled
def _header(frame: npt.NDArray[np.uint8], at: int) -> tuple[int, int]:
    """Return the length of the array at this place, and where its elements begin; beyond the frame if none is."""
    end = len(frame)
    code = int(frame[at]) if at < end else 0
    if 0x90 <= code <= 0x9F:
        return code - 0x90, at + 1
    width = 2 if code == 0xDC else 4 if code == 0xDD else 0
    if width == 0 or at + width >= end:
        return 0, end + 1
    length = 0
    for place in range(at + 1, at + 1 + width):
        length = (length << 8) | int(frame[place])
    return length, at + 1 + width


@compiled
def _bits(frame: npt.NDArray[np.uint8], at: int) -> np.uint64:
    bits = np.uint64(0)
    for place in range(at, at + 8):
        bits = bits << np.uint64(8) | np.uint64(frame[place])
    return bits


@compiled
def add_up(told: Ints) -> tuple[float, int, int, int, bool]:
    """Return emitted tokens, context, longest draft, drafted tokens, and whether all drafted what they were allowed."""
    emitted, context, longest, drafted, is_full = 0.0, 0, 0, 0, True
    for i in range(told.shape[1]):
        emitted += told[ROW_EMITTED, i]
        context += min(told[ROW_CONTEXT, i], MANY)
        longest = max(longest, told[ROW_DRAFTED, i])
        drafted += told[ROW_DRAFTED, i]
        is_full = is_full and told[ROW_DRAFTED, i] >= told[ROW_LIMIT, i]
    return emitted, context, longest, drafted, is_full


@compiled
def take_in(
    table: Ints, evidence: Floats, times: Floats, places: Ints, size: int, told: Ints, trials: Floats,
    successes: Floats, record: int, time_s: float, most: int, is_catching_up: bool, keep: float, fade: float,
) -> tuple[int, Ints]:  # fmt: skip
    """Take in one step's rows; return how many requests are alive now, and the (n,) limits before this record.

    There must be room for n more. `places`, (capacity,), says where the requests of the last record are, and is only a
    first guess: requests move when others end.
    """
    n = told.shape[1]
    limit = np.empty(n, np.int64)
    place = -1
    for i in range(n):
        place = _place(table, places[i], place + 1, size, told[ROW_HANDLE, i])
        if place < 0:
            place = size
            _add(table, evidence, times, place, told[ROW_HANDLE, i], record, most)
            size += 1
        places[i] = place
        limit[i] = table[LIMIT, place]
        _update(table, told, i, place, record, is_catching_up)
        if told[ROW_EMITTED, i] > 0 and times[FIRST_TOKEN, place] == np.inf:
            times[FIRST_TOKEN, place] = time_s
        _weigh(evidence, trials, successes, i, place, keep, fade)
    return size, limit


@compiled
def _place(table: Ints, last: int, next_one: int, size: int, handle: int) -> int:
    if last < size and table[HANDLE, last] == handle:
        return last
    return find(table, size, handle, next_one)


@compiled
def find(table: Ints, size: int, handle: int, start: int) -> int:
    """Return where a request is, -1 if nowhere; looked for from `start` on: batches mostly keep the table's order."""
    for place in range(start, size):
        if table[HANDLE, place] == handle:
            return place
    for place in range(min(start, size)):
        if table[HANDLE, place] == handle:
            return place
    return -1


@compiled
def arrive(
    table: Ints, evidence: Floats, times: Floats, size: int, handle: int, record: int,
    time_s: float, priority: int, most: int, ttft_s: float, tpot_s: float,
) -> int:  # fmt: skip
    """Take in an arrival, also of a request that is known; return how many are alive now. There must be room."""
    place = find(table, size, handle, 0)
    if place < 0:
        place = size
        _add(table, evidence, times, place, handle, record, most)
        size += 1
    table[PRIORITY, place], table[MOST, place] = priority, most
    times[ARRIVED, place], times[TTFT, place], times[TPOT, place] = time_s, ttft_s, tpot_s
    return size


@compiled
def _add(table: Ints, evidence: Floats, times: Floats, place: int, handle: int, record: int, most: int) -> None:
    """Begin a request that nothing is known about."""
    for column in range(FIELDS):
        table[column, place] = 0
    for j in range(evidence.shape[2]):
        evidence[0, place, j] = evidence[1, place, j] = 0.0
    times[ARRIVED, place] = 0.0
    times[FIRST_TOKEN, place] = times[TTFT, place] = times[TPOT, place] = np.inf
    table[HANDLE, place], table[SEEN, place], table[BORN, place], table[MOST, place] = handle, -1, record, most


@compiled
def _update(table: Ints, told: Ints, i: int, place: int, record: int, is_catching_up: bool) -> None:
    limit, drafted, context = told[ROW_LIMIT, i], told[ROW_DRAFTED, i], told[ROW_CONTEXT, i]
    is_prefill = told[ROW_IS_PREFILL, i]
    table[SEEN, place] = record
    table[CONTEXT, place] = context
    if (drafted if is_catching_up else limit) > 0:
        table[DRAFTER, place] = context
    table[EMITTED, place] += min(told[ROW_EMITTED, i], MANY)
    table[LIMIT, place] = 0 if is_prefill != 0 and drafted == 0 else limit  # inside the prompt nothing is drafted
    table[IS_PREFILL, place] = is_prefill
    table[IS_PREEMPTED, place] = 0


@compiled
def _weigh(evidence: Floats, trials: Floats, successes: Floats, i: int, place: int, keep: float, fade: float) -> None:
    """Add a row's trials to its request's, which fade by `keep` if it has any."""
    k_max = evidence.shape[2]
    share = keep if k_max > 0 and trials[i, 0] > 0.0 else fade
    for j in range(k_max):
        evidence[0, place, j] = evidence[0, place, j] * share + trials[i, j]
        evidence[1, place, j] = evidence[1, place, j] * share + successes[i, j]


@compiled
def remove(table: Ints, evidence: Floats, times: Floats, size: int, handles: Ints) -> int:
    """Let go of requests, known or not; those behind move up. Return how many are left."""
    is_gone, place = np.zeros(size, np.bool_), -1
    for i in range(len(handles)):
        place = find(table, size, handles[i], place + 1)
        if place >= 0:
            is_gone[place] = True
    left = 0
    for place in range(size):
        if is_gone[place]:
            continue
        if left < place:
            for column in range(FIELDS):
                table[column, left] = table[column, place]
            for j in range(evidence.shape[2]):
                evidence[0, left, j], evidence[1, left, j] = evidence[0, place, j], evidence[1, place, j]
            for row in range(TIMES):
                times[row, left] = times[row, place]
        left += 1
    return left


@compiled
def slack(table: Ints, times: Floats, size: int, now_s: float) -> tuple[Floats, Floats]:
    """Return how far each request is ahead of what is wanted, (size,) each; infinite where nothing is.

    Before its first token: seconds that are left for it. After it: tokens that it has beyond those that were due.
    """
    seconds, tokens = np.full(size, np.inf), np.full(size, np.inf)
    for i in range(size):
        if times[FIRST_TOKEN, i] == np.inf:
            seconds[i] = times[ARRIVED, i] + times[TTFT, i] - now_s
        elif times[TPOT, i] < np.inf:
            tokens[i] = table[EMITTED, i] - 1 - (now_s - times[FIRST_TOKEN, i]) / times[TPOT, i]
    return seconds, tokens


@compiled
def in_batch(table: Ints, size: int, record: int, idle: int) -> tuple[Bools, Bools]:
    """Return (size,) which requests are in the batch now, and which of them are past their prompt."""
    running, decoding = np.empty(size, np.bool_), np.empty(size, np.bool_)
    for i in range(size):
        seen = table[SEEN, i]
        running[i] = seen >= 0 and record - seen < idle and table[IS_PREEMPTED, i] == 0
        decoding[i] = running[i] and table[IS_PREFILL, i] == 0
    return running, decoding
