"""Acceptance and confidence by decree on vLLM's V2 runner, for engines whose weights are random.

Each draft token gets a confidence and a fate, keyed by request and by its place in the answer, so that every arm meets
the same luck. The generator is that of env/profile/acceptance_model.py, in tensor operations that a CUDA graph can
hold. The drafter's logits say one token with that confidence, so that vLLM's estimator and FASER read it where they
always do; the target's logits are raised at the draft's token, or beside it, before vLLM's own rejection sampler.
Everything else is computed as always, and costs what it costs. Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

# A generator fitted to a measured run of EAGLE (Spec-Bench; a test holds these to env/calibration/acceptance_fit.py).
# The run tells no confidences: theirs are a default's, whose AUC is 0.83 at the first position.
INTERCEPTS: Final = (3.19484, 2.21788, 1.65731, 0.42044, 1.03071)
MEAN_LOGIT, DROP, SPREAD, FURTHEST = 0.0, 0.15, 1.5, 2.8782  # of confidence; per position; in scores, cut off there
REQUEST_SHARE, CARRY, HIDDEN = 0.1, 0.3, 0.39902
CERTAIN: Final = 1e4  # above any logit
LEVEL, RESIDUAL, CHAIN, COIN, TOKEN = range(5)  # what is drawn


class Fates:
    """How sure the drafter is of each draft token, and whether the target accepts it. All tensors are of one length.

    :param requests: int64, what tells requests apart
    :param places: int64, where in its context the token before the draft token stands
    :param steps: int64, how many draft tokens stand before it in its draft
    """

    def __init__(self, longest: int, device: torch.device) -> None:
        if longest > len(INTERCEPTS):
            raise ValueError(f"drafts of {longest} tokens; expected at most {len(INTERCEPTS)}")
        self._intercepts = torch.tensor(INTERCEPTS, device=device)
        fresh = math.sqrt(1.0 - CARRY * CARRY)
        shares = [[(CARRY**step if at == 0 else fresh * CARRY ** (step - at)) if at <= step else 0.0
                   for at in range(longest)] for step in range(longest)]  # fmt: skip
        self._shares = torch.tensor(shares, device=device)  # of each draft token's own luck in a later one's score
        self._columns = torch.arange(longest, device=device)

    def logits(self, requests: Tensor, places: Tensor, steps: Tensor) -> Tensor:
        """Return the confidences' logits."""
        chain = normal(CHAIN, requests[:, None], (places - steps)[:, None], self._columns[None])
        own = (chain * self._shares[steps]).sum(-1)
        score = math.sqrt(REQUEST_SHARE) * normal(LEVEL, requests) + math.sqrt(1.0 - REQUEST_SHARE) * own
        return MEAN_LOGIT - DROP * steps + SPREAD * score.clamp(-FURTHEST, FURTHEST)

    def are_accepted(self, requests: Tensor, places: Tensor, steps: Tensor) -> Tensor:
        """Return whether the target accepts each, given that it accepted all before it in the draft."""
        hidden = HIDDEN * normal(RESIDUAL, requests)
        chance = (self._intercepts[steps] + self.logits(requests, places, steps) + hidden).sigmoid()
        return uniform(COIN, requests, places, steps) < chance


def uniform(kind: int, *keys: Tensor) -> Tensor:
    """Return a number in (0, 1) that looks random and is the same for the same keys."""
    mixed = torch.full_like(keys[0], 0x9E3779B9 + kind)
    for key in keys:
        mixed = ((mixed ^ key) * 0x2545F491) & 0x7FFFFFFF
        mixed = ((mixed ^ (mixed >> 15)) * 0x5BD1E995) & 0x7FFFFFFF
        mixed = mixed ^ (mixed >> 13)
    return ((mixed & 0xFFFFFF).float() + 0.5) / 2**24


def normal(kind: int, *keys: Tensor) -> Tensor:
    """Return the same as a draw of N(0, 1)."""
    return math.sqrt(2.0) * torch.erfinv(2.0 * uniform(kind, *keys) - 1.0)


class Decree:
    """Puts the fates upon the engine of this process: made before it, it holds for as long as that lives."""

    def __init__(self, longest: int) -> None:
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
        from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
        from vllm.v1.worker.gpu.states import RequestState

        self._longest = longest
        self._fates: Any = None
        self._requests: Any = None  # (slots + 1,) what tells requests apart; the last is that of padding
        self._drawing: Any = None  # requests, places and steps of the rows that draft
        _wrap(RequestState, "__init__", self._around_states)
        _wrap(RequestState, "add_request", self._around_request)
        _wrap(DraftModelSpeculator, "sample_draft", self._around_draft)
        _wrap(DraftModelSpeculator, "compute_draft_logits", self._around_logits)
        _wrap(RejectionSampler, "__call__", self._around_verdict)

    def _around_states(self, inherited: Call, states: Any, *given: Any, **named: Any) -> None:
        inherited(states, *given, **named)
        self._fates = Fates(self._longest, states.device)
        self._requests = torch.zeros(states.max_num_reqs + 1, dtype=torch.int64, device=states.device)

    def _around_request(self, inherited: Call, states: Any, *given: Any, **named: Any) -> None:
        """Tell requests apart by the lengths of their prompts, which an arm does not change."""
        inherited(states, *given, **named)
        name, prompt_len = (*given, *named.values())[:2]
        self._requests[states.req_id_to_index[name]].fill_(prompt_len)

    def _around_draft(
        self, inherited: Call, speculator: Any, hidden: Tensor, places: Tensor, slots: Tensor, *given: Any, **named: Any
    ) -> Any:
        step = given[2].long().expand(len(places))
        self._drawing = self._requests[slots.long()], places.long(), step
        return inherited(speculator, hidden, places, slots, *given, **named)

    def _around_logits(self, inherited: Call, speculator: Any, hidden: Tensor, *given: Any) -> Tensor:
        """Let one token have the confidence that is decreed, all others the rest.

        Random weights say next to nothing: all their logits are about 0.
        """
        logits: Tensor = inherited(speculator, hidden, *given)
        spoken = torch.isfinite(logits[0]).sum().clamp(min=2)  # an EAGLE-3 head's own vocabulary is smaller
        told = self._fates.logits(*self._drawing) + (spoken - 1.0).log()
        tokens = (uniform(TOKEN, *self._drawing[:2]) * spoken).long()
        return logits.scatter(1, tokens[:, None], told.to(logits.dtype)[:, None])

    def _around_verdict(self, inherited: Call, sampler: Any, logits: Tensor, batch: Any, *given: Any) -> Any:
        """Raise each draft's own token in the row that judges it, or the one beside it."""
        ids, steps = batch.input_ids[batch.logits_indices].long(), batch.expanded_local_pos.long()
        # A row judges the next one's input; the first's is no draft.
        drafts, is_judge = ids.roll(-1), steps.roll(-1) > 0
        requests, places = self._requests[batch.expanded_idx_mapping.long()], batch.positions[batch.logits_indices]
        kept = self._fates.are_accepted(requests, places.long(), steps.clamp(max=self._longest - 1))
        tokens = torch.where(kept, drafts, drafts + 1) % logits.shape[-1]
        raised = torch.where(is_judge, CERTAIN, logits.gather(1, tokens[:, None])[:, 0].float())
        logits.scatter_(1, tokens[:, None], raised.to(logits.dtype)[:, None])
        return inherited(sampler, logits, batch, *given)


Call = Callable[..., Any]


def _wrap(kind: type, name: str, around: Call) -> None:
    inherited = getattr(kind, name)
    setattr(kind, name, lambda *given, **named: around(inherited, *given, **named))
