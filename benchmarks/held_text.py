"""Holds an engine to texts recorded beforehand: whatever it computes, the recorded token comes out.

Greedy answers in bf16 part ways between engines that verify in batches of other shapes, and some texts are easier to
draft for than others: at one request that luck is most of what two arms of a benchmark differ by. Held to one text, all
arms draft for the same tokens. One logit of each row is raised before vLLM's sampler looks (0.32, V1 runner, greedy,
synchronous scheduling); everything else is done as always, and costs what it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CERTAIN = 1e4  # above any logit


def held_rows(
    texts: Sequence[Sequence[int]], emitted: Sequence[int], drafts: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return which rows of a step's logits are held, and the token of each.

    :param texts: of each request in the batch
    :param emitted: tokens of each request so far
    :param drafts: draft tokens of each that are verified; a request has a row more than that, one after the other
    """
    rows: list[int] = []
    tokens: list[int] = []
    first = 0
    for text, begin, count in zip(texts, emitted, drafts, strict=True):
        held = text[begin : begin + count + 1]
        rows += range(first, first + len(held))
        tokens += held
        first += count + 1
    return rows, tokens


class HeldText:
    """Holds the requests named in `texts`, by the ids they were added with."""

    def __init__(self, runner: Any) -> None:
        self.texts: dict[str, list[int]] = {}
        self._runner = runner
        self._is_inside = False  # the rejection sampler calls the plain one for its last rows
        runner.sampler.register_forward_pre_hook(self._before_sampling, with_kwargs=True)
        if hasattr(runner, "rejection_sampler"):
            runner.rejection_sampler.register_forward_pre_hook(self._before_rejecting)
            runner.rejection_sampler.register_forward_hook(self._after_rejecting)

    def _before_sampling(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._is_inside:
            logits = named["logits"] if "logits" in named else args[0]
            self._hold(logits, [0] * len(logits))

    def _before_rejecting(self, module: Any, args: tuple[Any, ...]) -> None:
        self._is_inside = True
        verified, _, logits, _ = args
        self._hold(logits, verified.num_draft_tokens)

    def _after_rejecting(self, *_: Any) -> None:
        self._is_inside = False

    def _hold(self, logits: Any, drafts: Sequence[int]) -> None:
        if not self.texts:
            return
        names = self._runner.input_batch.req_ids
        texts = [self.texts.get(name.split("-")[0], []) for name in names]  # vLLM may add a suffix to an id
        emitted = [len(self._runner.requests[name].output_token_ids) for name in names]
        rows, tokens = held_rows(texts, emitted, drafts)
        logits[rows, tokens] = CERTAIN
