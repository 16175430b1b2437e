"""Pruned verification on the V2 runner: the part of FASER's mixin that feeds `PruningV2` and asks it.

Without exit heads, or where they cannot be used, it does nothing and says once why. It never waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..drafting.candidates_v2 import CandidatesV2
from ..gate import Gate
from ..graph_lengths import has_graphs
from ..host_copy import HostCopy
from ..operator_log import operator_log
from ..patches.pruning import PRUNABLE_ATTENTION_V2, PreparedStep, PruningHooksV2, attention_refusal, refusal_v2
from ..patches.pruning_graphs import free_bytes, shapes_to_come
from ..patches.v2 import is_dummy
from ..settings import AUTO, load_settings
from .exit_file import pruning_refusal, read_facts
from .exit_heads import load_heads
from .forward_v2 import CutNotes, PruningV2

if TYPE_CHECKING:
    from ..runner.step_events import StepEvents

logger = operator_log(__name__)

GRAPH_BYTES: Final = 1 << 20  # of a graph that fits into others' memory, as vLLM reckons it
MOST_UNTOLD: Final = 8  # steps; an older one whose time is still not known will not be


@dataclass(slots=True)
class PruneTrial:
    """A step that says something of what pruning takes, once its time and its tokens are known."""

    events: StepEvents
    requests: int
    has_pruned: bool
    tokens: HostCopy  # by request


class PruningRunnerV2(PruningHooksV2):
    """Mixin in front of vLLM's V2 runner, behind FASER's own hooks, which know the order and the clock."""

    pruning: PruningV2 | None = None  # None: every row is verified to full depth
    prune_gate: Gate | None = None  # None: every lease that asks for pruning gets it
    cut: CutNotes | None = None  # of the step under way
    events: StepEvents | None = None
    _candidates: CandidatesV2 | None = None
    _may_prune = (True, True)  # what the gate says for the step under way, and for the next one
    _trial: bool | None = None  # whether the step under way is pruned; None: it says nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._trials: deque[PruneTrial] = deque(maxlen=MOST_UNTOLD)
        with suppress(Exception):  # what is wrong is said once the target is loaded
            self._watch_drafter(load_settings().exit_heads)

    def _watch_drafter(self, path: str) -> None:
        """Note the drafter's likeliest tokens if heads will score them; it must not be loaded yet."""
        if path and pruning_refusal(self.vllm_config) is None and (count := read_facts(path).candidates):  # type: ignore[attr-defined]
            self._candidates = CandidatesV2(self.speculator, count)  # type: ignore[attr-defined]

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Let vLLM set up its KV cache; now the model is loaded and the attention groups are known."""
        self.pruning = None  # what was captured to measure memory is gone before the cache takes it
        result = super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        try:
            self._set_up_pruning()
        except Exception as error:  # a bad file, another model's heads, an unknown decoder
            logger.warning("FASER does not prune: %s", error)
        return result

    def _set_up_pruning(self) -> None:
        settings = load_settings()
        if not settings.exit_heads:
            return
        groups = len(self.kv_cache_config.kv_cache_groups)  # type: ignore[attr-defined]
        found = pruning_refusal(self.vllm_config) or refusal_v2(self)  # type: ignore[attr-defined]
        found = found or attention_refusal(self, PRUNABLE_ATTENTION_V2)
        if reason := found or (f"the KV cache has {groups} groups, expected one" if groups != 1 else None):
            raise ValueError(reason)
        heads = load_heads(settings.exit_heads, self.get_model())  # type: ignore[attr-defined]
        if heads.candidates and self._candidates is None:
            raise ValueError("the drafter shows no likely tokens to score")
        is_pinned = self.device.type == "cuda"  # type: ignore[attr-defined]
        self.pruning = PruningV2(self, heads, self._candidates, is_pinned, self.mark_pruning)
        if settings.prune == AUTO:
            self.prune_gate, self._may_prune = Gate(), (False, False)
        logger.info("FASER may prune behind layers %s", ", ".join(map(str, heads.layers)))

    def capture_model(self, *args: Any, **kwargs: Any) -> Any:
        """Let vLLM capture its graphs, and then the target's in two halves; return the bytes that they take."""
        taken = super().capture_model(*args, **kwargs)  # type: ignore[misc]
        if self.pruning is None or not has_graphs(self.vllm_config):  # type: ignore[attr-defined]
            return taken
        before = free_bytes()
        try:
            self.pruning.capture()
            to_come = len(self.pruning.heads.layers) * shapes_to_come(self) * 2 * GRAPH_BYTES
        except Exception as error:  # graphs of one length each, too little memory
            said = " ".join(f"{type(error).__name__}: {error}".split())
            logger.warning("FASER prunes no step that replays a CUDA graph: %s", said)
            to_come = 0
        taken += max(before - free_bytes(), 0) + to_come
        if kwargs.get("profile_only"):
            self.pruning.release()
        return taken

    def mark_pruning(self, moment: str) -> None:
        """Note a moment of the step under way."""

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the target for one step."""
        if self.pruning is not None and not is_dummy(args, kwargs):
            self.cut, self._trial = None, None
            self.pruning.begin()
            if self.prune_gate is not None:
                self._learn(self.prune_gate)
                # What is asked now holds for what is drafted in this step: gate.py says why.
                asked = self.prune_gate.ask(len(scheduler_output.num_scheduled_tokens))
                self._may_prune = self._may_prune[1], asked
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def prune_step(self, step: PreparedStep) -> None:
        """Open the step for pruning if its order asks for that and the gate lets it."""
        pruning, order = self.pruning, getattr(self, "order", None)
        if pruning is None or order is None:
            return
        try:
            if not pruning.could_open(order.prune, step.batch):
                return
            batch, may_prune = step.batch, self._may_prune[0]
            if may_prune:
                pruning.open(order.prune, step)
            if batch.num_tokens == batch.num_draft_tokens + batch.num_reqs and self._may_prune[0] == self._may_prune[1]:
                self._trial = may_prune
        except Exception:
            pruning.fail("FASER prunes no more after a failure; vLLM verifies every row")

    def prune_sample(self, sample: Callable[[], Any], batch: Any) -> Any:
        """Run the (rejection) sampler over the batch."""
        if self.pruning is None:
            return sample()
        sampled = self.pruning.sample(sample)
        try:
            self.cut = self.pruning.told()
            self._note_trial(batch, sampled[1])
        except Exception:
            logger.exception("FASER could not note what pruning did in a step")
        return sampled

    def _note_trial(self, batch: Any, counts: Any) -> None:
        if self._trial and self.cut is None:
            return  # nobody looked: a whole graph was replayed
        if self.prune_gate is not None and self._trial is not None and self.events is not None:
            is_pinned = self.device.type == "cuda"  # type: ignore[attr-defined]
            tokens = HostCopy(counts if is_pinned else counts.clone(), is_pinned)
            self._trials.append(PruneTrial(self.events, int(batch.num_reqs), self._trial, tokens))

    def _learn(self, gate: Gate) -> None:
        """Take in the steps that the device is past; waits for nothing."""
        while self._trials and (time_s := self._trials[0].events.seconds("begin", "end")) > 0.0:
            trial = self._trials.popleft()
            if (counts := trial.tokens.values()) is not None:
                gate.note(trial.requests, trial.has_pruned, time_s, sum(counts))

    def shutdown(self) -> None:
        """Let go of what vLLM frees."""
        self.pruning = self.cut = None
        super().shutdown()  # type: ignore[misc]
