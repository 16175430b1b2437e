"""Pruned verification: two captured halves of the target with rows leaving in between, against the whole in one.

Every request keeps the same number of rows, as if the heads had cut all of them there. `decided` lets the exit heads'
kernel decide in between, with the copy to the host that this takes; `free` knows the answer. `fixed` is what FASER
does on vLLM's V2 runner: the host fixes how many rows go on, and two captured kernels choose which, for which nobody
waits; this decoder wants as many rows of each request, so its rows are taken for that, and its tokens mean nothing.
`equal_tokens` is the share of kept rows whose likeliest token is the whole pass's; kernels of other shapes may round
differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from machines import machine_for, told
from pair import Pair, Pass, pair_for
from part_kernel import SIZE, TINY, Case, Size

from faser.engine_adapter.partition.shares import UNSPLIT
from faser.engine_adapter.pruning import prefix_kernel
from faser.engine_adapter.pruning.prefixes import DraftLayout

LONG = 7  # draft tokens of "32 long"


def measure(is_dry: bool) -> dict[str, Any]:
    """Return each batch size's."""
    pair = pair_for(machine_for(is_dry), (2,) if is_dry else (16, 64))
    found = {f"{requests}": times(pair, requests) for requests in pair.sizes.requests}
    if not is_dry:
        pair.sizes = replace(pair.sizes, length=LONG)
        found["32 long"] = times(pair, 32)
    return found


def times(pair: Pair, requests: int) -> dict[str, Any]:
    """Return times of the whole pass and of cut ones by rows kept per request, and the gain over the whole."""
    machine, rows = pair.machine, 1 + pair.sizes.length
    partition, cut = machine.partitions.named(UNSPLIT), pair.layers // 2
    whole = pair.verify(requests)
    machine.capture(partition, "verify", "whole", whole)
    lower, upper = halves(pair, requests, cut)
    machine.capture(partition, "verify", "lower", lower)
    kept = sorted({1, (rows + 1) // 2, rows})
    uppers = {count: upper(count) for count in kept}
    chosen = {count: torch.arange(requests * count, device=machine.device) for count in kept}
    for count in kept:
        machine.capture(partition, "verify", count, uppers[count])
        machine.capture(partition, "verify", f"chosen {count}", upper(count, chosen[count]))
    size = TINY if machine.is_dry else Size(pair.target.shape.hidden, SIZE.vocabulary, SIZE.candidates)
    case = Case(machine.device, size, [pair.sizes.length] * requests, machine.dtype, requests)
    threshold = case.threshold(0.3)
    for count in kept:
        machine.capture(partition, "verify", f"choice {count}", choice(case, threshold, chosen[count], requests))

    def launch(*shapes: Any, decide: bool = False) -> Callable[[], None]:
        def run() -> None:
            for shape in shapes[:-1]:
                machine.launch(partition, "verify", shape)
            if decide:
                case.by_kernel(threshold)
            machine.launch(partition, "verify", shapes[-1])

        return run

    arms = {"whole": launch("whole")}
    for count in kept:
        arms[f"free {count}"] = launch("lower", count)
        arms[f"decided {count}"] = launch("lower", count, decide=True)
        arms[f"fixed {count}"] = launch("lower", f"choice {count}", f"chosen {count}")
    times = machine.rounds(arms, pair.sizes.rounds)
    equal = {}
    for count in kept:
        arms["whole"]()
        arms[f"free {count}"]()
        machine.wait()
        expected = whole.answer.view(requests, rows)[:, :count].flatten()
        equal[str(count)] = float((uppers[count].answer == expected).float().mean())
    machine.forget()
    gains = {
        name: told([one / own for one, own in zip(times["whole"], times[name], strict=True)])
        for name in arms
        if name != "whole"
    }
    return {
        "requests": requests, "rows": rows, "cut_behind_layer": cut, "layers": [pair.layers, pair.target.shape.layers],
        "ms": {name: told(times[name]) for name in arms}, "gain": gains, "equal_tokens": equal,
    }  # fmt: skip


def choice(case: Case, threshold: float, rows: torch.Tensor, requests: int) -> Callable[[], None]:
    """Return the work that fills `rows` (rows that go on,) with those that the heads think best of."""
    lengths = case.batch.drafts + 1
    layout = DraftLayout.of(case.batch.drafts, lengths, lambda array: torch.from_numpy(array).to(rows.device))
    budget = len(rows) - requests

    def work() -> None:
        chances = prefix_kernel.chances(case.head, case.lm_head, case.checks)
        rows.copy_(prefix_kernel.staying_rows(chances, threshold, layout, budget).rows)

    return work


def halves(pair: Pair, requests: int, cut: int) -> tuple[Callable[[], None], Callable[..., Pass]]:
    """Return the lower half's work, and the upper's by the rows that each request keeps, and which these are."""
    from decoder import Flow

    target, rows = pair.target, 1 + pair.sizes.length
    tokens = pair.tokens(requests, rows)
    hidden, device = target.shape.hidden, pair.machine.device
    state, residual = (torch.zeros(requests * rows, hidden, dtype=target.dtype, device=device) for _ in range(2))

    def lower() -> None:
        flow = target.through(target.enter(tokens), requests, 0, cut, target.context)
        state.copy_(flow.state)
        residual.copy_(flow.residual)

    def upper(kept: int, chosen: torch.Tensor | None = None) -> Pass:
        stays = (torch.arange(requests)[:, None] * rows + torch.arange(kept)).flatten().to(device)
        stays = stays if chosen is None else chosen
        answer = torch.zeros(requests * kept, dtype=torch.int64, device=device)

        def work() -> None:
            flow = Flow(state.index_select(0, stays), residual.index_select(0, stays))
            answer.copy_(target.leave(target.through(flow, requests, cut, pair.layers, target.context)))

        return Pass(work, answer)

    return lower, upper
