"""Copied drafts on the V1 runner: the part of FASER's mixin that looks up what followed the same words before.

A row whose match promises more than the drafter's draft gets the match's tokens and has length 0 for the drafter,
which catches up when it is asked again. Which row that is depends on confirmed tokens and on the order alone, so that
outputs stay the target's. Without a lease that asks for it this does nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ..operator_log import operator_log
from ..overlap.frontier_runner import joined_drafts
from ..patches.v1 import put_certain_drafts
from ..settings import load_settings
from ..steering.stop_rule import fitted_to
from .choice import match_refusal

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ..arrays import Floats
    from ..protocol import MatchRule
    from ..steering.orders import StepOrder, StepReport
    from .text_kernel import Tokens
    from .texts import CopiedDrafts, Texts

logger = operator_log(__name__)

MIB: Final = 1 << 20


class MatchingRunner:
    """Mixin in front of vLLM's V1 runners; `texts` is None where nothing is copied."""

    texts: Texts | None = None
    matches: ChosenCopies | None = None  # of the drafting in this step
    _salts: dict[str, str]  # by request that shares its answer and may copy from others'

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._salts = {}

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Let vLLM set up its KV cache; then compile what looks texts up."""
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        try:
            self._set_up_matching()
        except Exception as error:  # numba is missing or broken
            logger.warning("FASER copies no drafts: %s", error)

    def _set_up_matching(self) -> None:
        settings = load_settings()
        if match_refusal(self.vllm_config, settings) is None:  # type: ignore[attr-defined]
            from .texts import Texts, warm_up

            warm_up()
            self.texts = Texts(settings.match_mib * MIB, settings.shared_mib * MIB)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the target for one step."""
        self.matches = None
        if self.texts is not None:
            order = getattr(scheduler_output, "faser", None)
            self._salts |= {} if order is None else order.salts
            self._forget(self.texts, scheduler_output.finished_req_ids)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _forget(self, texts: Texts, names: set[str]) -> None:
        try:
            texts.forget(names, self._salts)
        except Exception:
            self.texts = None
            logger.exception("FASER copies no drafts any more after a failure; the drafter goes on")
        for name in names & self._salts.keys():
            del self._salts[name]

    def copy_drafts(
        self, order: StepOrder | None, sampled: Tensor | list[list[int]], lengths: list[int] | None
    ) -> None:
        """Copy drafts where a match pays; rows that have one get length 0, all rows if too few are left.

        :param lengths: by batch row, of the drafter's drafts; changed in place
        """
        if self.texts is None or order is None or order.match is None or lengths is None:
            return
        try:
            self.matches = self._matches(self.texts, order, order.match, sampled, lengths)
        except Exception:
            self.texts = self.matches = None
            logger.exception("FASER copies no drafts any more after a failure; the drafter goes on")
            return
        for row in self.matches.tokens:
            lengths[row] = 0
        if sum(map(bool, lengths)) < order.match.fewest:
            lengths[:] = [0] * len(lengths)

    def _matches(
        self, texts: Texts, order: StepOrder, rule: MatchRule, sampled: Tensor | list[list[int]], lengths: list[int]
    ) -> ChosenCopies:
        import numpy as np

        batch = self.input_batch  # type: ignore[attr-defined]
        names, tokens = batch.req_ids, batch.token_ids_cpu
        inside = self.discard_request_mask.np[: len(names)]  # type: ignore[attr-defined]
        asked = np.array([order.match_lengths.get(name, 0) for name in names], np.int64)
        ends = batch.num_tokens_no_spec[: len(names)].tolist()
        fresh, booked = fresh_tokens(sampled)
        known = [tokens[row, : end - count] for row, (end, count) in enumerate(zip(ends, booked, strict=True))]
        prompts = batch.num_prompt_tokens[: len(names)].tolist()
        found = texts.find(names, known, fresh, np.where(inside, 0, asked), prompts, self._salts)
        weights = np.array([order.match_weights.get(name, 1.0) for name in names])
        return ChosenCopies(found, rule, weights, lengths)

    def with_copies(self, drafts: Tensor | list[list[int]], drafted: list[int]) -> Tensor | list[list[int]]:
        """Return the drafter's drafts with the copied ones among them.

        :param drafted: tokens handed over of each row; changed where a row has copied ones
        """
        if self.matches is None or not self.matches.tokens:
            return drafts
        for row, tokens in self.matches.tokens.items():
            drafted[row] = len(tokens)
        put_certain_drafts(self, self.matches.tokens)
        return joined_drafts(drafts, self.matches.tokens)

    def report_copies(self, report: StepReport) -> None:
        """Add whose drafts are copied, and how sure the engine is of each token."""
        if self.matches is None or not self.matches.tokens:
            return
        report.copied = list(self.matches.tokens)
        report.confidences = report.confidences or [()] * len(report.drafted)
        for row in report.copied:
            report.confidences[row] = self.matches.confidences(row)


class ChosenCopies:
    """What was found for one batch, and whose draft it is."""

    def __init__(self, drafts: CopiedDrafts, rule: MatchRule, weights: Floats, lengths: list[int]) -> None:
        """Choose by what a token of each row is worth, (n,)."""
        import numpy as np

        from .texts import kept_of

        self._drafts = drafts
        longest = drafts.tokens.shape[1]
        slopes, intercepts, keep = (np.array(fitted_to(v, longest)) for v in (rule.slopes, rule.intercepts, rule.keep))
        kept, net = kept_of(drafts, slopes, intercepts, keep[None, :] / weights[:, None])
        asked = np.array(lengths) > 0
        is_used = (kept > 0) & ((net > rule.worth) | ~asked)
        if not asked.any() and float((net * weights)[is_used].sum()) <= rule.least:
            is_used[:] = False
        self.tokens: dict[int, tuple[int, ...]] = {  # by batch row
            row: tuple(drafts.tokens[row, : kept[row]].tolist()) for row in np.flatnonzero(is_used).tolist()
        }

    def confidences(self, row: int) -> tuple[float, ...]:
        """Return the chance of each token of a row's draft, and of one behind it that was found and not kept."""
        import numpy as np

        told = self._drafts.logits[row, : min(len(self.tokens[row]) + 1, self._drafts.lengths[row])]
        return tuple((1.0 / (1.0 + np.exp(-told))).tolist())


def fresh_tokens(sampled: Tensor | list[list[int]]) -> tuple[Tokens, list[int]]:
    """Return what was just sampled, (n, width) and -1 behind its end, and how much of it vLLM's batch holds already."""
    import numpy as np

    if not isinstance(sampled, list):
        fresh: np.ndarray = sampled.cpu().numpy().astype(np.int32)
        return fresh, [0] * len(fresh)
    booked = list(map(len, sampled))
    fresh = np.full((len(sampled), max(booked, default=0)), -1, np.int32)
    for row, tokens in enumerate(sampled):
        fresh[row, : len(tokens)] = tokens
    return fresh, booked
