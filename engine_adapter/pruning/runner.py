"""Pruned verification on the V1 runner: the part of FASER's mixin that feeds `Pruning` and asks it.

Behind RunnerHooks in the order of classes, so that the phase times include what pruning costs. Without exit heads,
or where they cannot be used, it does nothing and says once why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..gate import Gate
from ..operator_log import operator_log
from ..patches.pruning import PruningHooks, attention_refusal
from ..settings import AUTO, load_settings
from ..steering.orders import StepReport
from .exit_file import pruning_refusal
from .exit_heads import load_heads
from .forward import Notes, Pruning

logger = operator_log(__name__)


class PruningRunner(PruningHooks):
    """Mixin in front of CPUModelRunner or the V1 GPUModelRunner."""

    pruning: Pruning | None = None  # None: every row is verified to full depth
    gate: Gate | None = None  # None: every lease that asks for pruning gets it
    _may_prune = (False, False)  # what the gate says for the step under way, and for the next one
    _could_prune = False  # a lease asked for it in the step under way, which has nothing but drafts to verify
    _notes: Notes | None = None  # of the drafting that the next step verifies
    _could_note = False  # that drafting had a book for notes, whether or not any were asked for

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Let vLLM set up its KV cache; now the model is loaded and the attention groups are known."""
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        try:
            self._set_up_pruning()
        except Exception as error:  # a bad file, another model's heads, an unknown decoder
            logger.warning("FASER does not prune: %s", error)

    def _set_up_pruning(self) -> None:
        settings = load_settings()
        path = settings.exit_heads
        if not path:
            return
        if reason := pruning_refusal(self.vllm_config):  # type: ignore[attr-defined]
            raise ValueError(reason)
        if reason := attention_refusal(self):
            raise ValueError(reason)
        groups = len(self.kv_cache_config.kv_cache_groups)  # type: ignore[attr-defined]
        if groups != 1:
            raise ValueError(f"the KV cache has {groups} groups, expected one")
        heads = load_heads(path, self.get_model())  # type: ignore[attr-defined]
        self.pruning, self.gate = Pruning(self, heads), Gate() if settings.prune == AUTO else None
        logger.info("FASER may prune behind layers %s", ", ".join(map(str, heads.layers)))

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run the target for one step."""
        self.verified = self.common = None
        self._could_prune = False
        if self.pruning is not None:
            self.pruning.forget_step()
            if self.gate is not None and self.pruning.is_on:
                self._may_prune = self._may_prune[1], self.gate.ask(self.input_batch.num_reqs)  # type: ignore[attr-defined]
        return super().execute_model(*args, **kwargs)  # type: ignore[misc]

    def prune_forward(self, forward: Callable[[], Any]) -> Any:
        """Run the target's forward pass, in two parts where a lease asks for it."""
        pruning = self.pruning
        if pruning is None or not self._opens(pruning):
            return forward()
        with pruning.attached():
            output = forward()
        return pruning.spread(output)

    def _opens(self, pruning: Pruning) -> bool:
        """Tell whether this step is pruned; a failure is a step without pruning, and the last attempt."""
        order = getattr(self, "order", None)
        try:
            if order is None or not pruning.could_open(order.prune, self.verified, self.common):
                return False
            drafts: list[int] = self.verified.num_draft_tokens
            is_alone = self.common.num_actual_tokens == sum(drafts) + len(drafts)
            may_prune = self.gate is None or self._may_prune[0]
            is_open = may_prune and pruning.open(order.prune, self.verified, self.common, self._notes)
            # A step without pruning counts beside those with it only if it could have been one of them.
            could_open = self._could_note or not pruning.heads.candidates
            self._could_prune = is_alone and could_open and is_open is may_prune
            return is_open
        except Exception:
            pruning.is_on = False
            logger.exception("FASER prunes no more after a failure; vLLM verifies every row")
            return False

    def prune_sample(self, sample: Callable[[Any, Any], Any], logits: Any, metadata: Any) -> Any:
        """Run the (rejection) sampler over `logits`."""
        return sample(logits, metadata) if self.pruning is None else self.pruning.sample(sample, logits, metadata)

    def sample_tokens(self, grammar_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample, and draft for the next step."""
        self._notes, self._could_note = None, False
        if self.pruning is not None and grammar_output is not None:
            self.pruning.widen_logits()
        return super().sample_tokens(grammar_output, *args, **kwargs)  # type: ignore[misc]

    def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> Any:
        """Draft, and keep what the drafter noted for the verification of these drafts, if that may be pruned."""
        if self.pruning is not None and (count := self.pruning.heads.candidates):
            order = getattr(self, "order", None)
            may_prune = self.pruning.obeys(None if order is None else order.next_prune)
            may_prune = may_prune and (self.gate is None or self._may_prune[1])
            self.drafter.candidates = count if may_prune else 0  # type: ignore[attr-defined]
        drafts = super().propose_draft_token_ids(*args, **kwargs)  # type: ignore[misc]
        self._could_note = getattr(self.drafter, "book", None) is not None  # type: ignore[attr-defined]
        book = getattr(self.drafter, "candidate_book", None)  # type: ignore[attr-defined]
        if self.pruning is not None and book is not None:
            names = self.input_batch.req_ids  # type: ignore[attr-defined]
            tables = book.tables(len(names))
            if tables is not None:
                self._notes = Notes({name: row for row, name in enumerate(names)}, *tables)
        return drafts

    def note_step(self, runner_s: float, sampled: list[list[int]]) -> None:
        """Tell the gate what the step took; one beside prompt rows, or that had nothing to prune, says nothing.

        Nor does one whose drafts are verified the other way: pruning's notes are made a step before they are of use.
        """
        if self.gate is not None and self._could_prune and self._may_prune[0] == self._may_prune[1]:
            self.gate.note(len(sampled), self._may_prune[0], runner_s, sum(map(len, sampled)))

    def report_pruning(self, report: StepReport) -> None:
        """Write down what left this step's forward pass, and what finding that out took."""
        if (pruning := self.pruning) is not None:
            report.pruned, report.saved_rows = pruning.pruned(), pruning.saved_rows()
            report.prune_layer, report.prune_s = pruning.layer, pruning.decide_s
