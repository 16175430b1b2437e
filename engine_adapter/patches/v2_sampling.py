"""Names of vLLM's V2 rejection sampler that draws by seed touch. Nothing here decides anything; imports are lazy."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any

from .speculators.rounds import on_device

if TYPE_CHECKING:
    from torch import Tensor


class ComparedDrafts:
    """What vLLM's rejection sampler compared: a row for each draft token and, behind those of each request, one.

    `sampled` (requests, longest + 1) and `counts` (requests,), how many of these are said, are what it made of it.
    """

    def __init__(self, sampler: Any, given: dict[str, Any], made: tuple[Tensor, Tensor, Tensor]) -> None:
        self._sampler, self._given = sampler, given
        self._processed, self.sampled, self.counts = made
        self.ends: Tensor = given["cu_num_logits"]  # (requests + 1,) where each request's rows begin
        # (rows,) what each row reads; behind a request's first row these are its drafts, -1 for one that is void.
        self.drafts: Tensor = given["verify_draft_sampled"]

    def is_by_seed(self) -> Tensor:
        """Return which requests (requests,) have a seed, and draw at random."""
        states = self._sampler.sampling_states
        has_seed = states.seeds_set[self._given["idx_mapping_np"]].tolist()
        temperature = states.temperature.gpu[self._given["idx_mapping"]]
        by_seed: Tensor = on_device(has_seed, temperature.device, "bool") & (temperature > 0)
        return by_seed

    def draws(self) -> Tensor:
        """Return the token (rows,) that vLLM says in each row where it does not speculate."""
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

        states, given = self._sampler.sampling_states, self._given
        drawn: Tensor = gumbel_sample(
            self._processed, given["expanded_idx_mapping"], states.temperature.gpu, states.seeds.gpu, given["pos"],
            apply_temperature=False, is_drafting=False, use_fp64=self._sampler.use_fp64_gumbel,
        )  # fmt: skip
        return drawn


def around_comparison(runner: Any, amend: Callable[[ComparedDrafts], tuple[Tensor, Tensor] | None]) -> bool:
    """Let `amend` exchange (sampled, counts) in steps with a seed, None to leave them; False for another sampler."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    checker = getattr(runner, "rejection_sampler", None)
    if type(checker) is not RejectionSampler or checker.watermark_key is not None:
        return False
    fly_window = getattr(checker, "fly_window_size", 0)  # vLLM 0.33
    if checker.synthetic_conditional_rates is not None or fly_window:  # answers are not the target's anyway
        return False
    if "_verify" in vars(checker):  # the KV cache is set up once more
        return True
    inherited, states = checker._verify, checker.sampler.sampling_states
    taken = signature(inherited)

    def verify(*args: Any, **named: Any) -> Any:
        made = inherited(*args, **named)
        given = taken.bind(*args, **named).arguments
        if not states.any_explicit_seed(given["idx_mapping_np"]):
            return made
        amended = amend(ComparedDrafts(checker.sampler, given, made))
        return made if amended is None else (made[0], *amended)

    checker._verify = verify  # type: ignore[method-assign]
    return True
