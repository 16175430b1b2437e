"""Names of vLLM's V1 samplers that draws by seed touch: where a token is drawn, where drafts are compared.

Nothing here decides anything. Imports of vLLM are lazy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class StepDraws(Protocol):
    """What puts one step's draws in the place of vLLM's; it never raises."""

    tests: list[int]  # draft tokens that each batch row has verified, once vLLM's rejection sampler is asked
    draws_all: bool  # nobody else says anything in the step: vLLM's own draws can be spared

    def put(self, logits: Tensor, tokens: Tensor) -> bool:
        """Put draws from `logits` (rows, vocabulary), as temperature and filters left them, into `tokens` (rows,).

        Return False if that failed.
        """

    def compare(self, logits: Tensor, drafts: Tensor, bonus: Tensor, output: Tensor) -> bool:
        """Put draws up to the first that is not the draft into `output` (rows, longest + 1); -1 behind them.

        Return False if that failed.

        :param logits: (draft tokens of all rows, vocabulary).
        :param bonus: (rows, 1) draws behind the last draft token.
        """


class SeededHooks:
    """Mixin in front of vLLM's V1 runners: the sampler, and the bookkeeping behind it."""

    def draw_by_seed(self, sample: Callable[[Any, Any], Any], logits: Any, metadata: Any) -> Any:
        """Run the (rejection) sampler over `logits`."""
        return sample(logits, metadata)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        return self.draw_by_seed(super()._sample, logits, spec_decode_metadata)  # type: ignore[misc]

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        inherited = super()._bookkeeping_sync  # type: ignore[misc]
        if self.device.type != "cpu":  # type: ignore[attr-defined]
            return inherited(*args, **kwargs)
        # vLLM takes back what a row inside of a prompt drew (0.32 gpu_model_runner.py:3502); a CPU's generator cannot
        # do so, and the engine would end.
        generators = self.input_batch.generators  # type: ignore[attr-defined]
        hidden = dict(generators)
        generators.clear()
        try:
            return inherited(*args, **kwargs)
        finally:
            generators.update(hidden)


def seeds_of(runner: Any) -> dict[int, int]:
    """Return the seed of each batch row that has one and draws at random."""
    return {row: generator.initial_seed() for row, generator in runner.input_batch.generators.items()}


def has_drawn_drafts(runner: Any) -> bool:
    """Return whether the drafts at hand were drawn from a distribution that vLLM's rule knows."""
    return getattr(runner, "_draft_probs", None) is not None


def rows_at_random(runner: Any) -> list[bool]:
    """Return for each batch row whether its tokens are drawn at random."""
    batch = runner.input_batch
    return [name in batch.random_reqs for name in batch.req_ids[: batch.num_reqs]]


def last_positions(runner: Any, rows: list[int]) -> Tensor:
    """Return where in its sequence the last token is that each of these batch rows has in the step: (rows,) int64."""
    ends = runner.query_start_loc.gpu[1:][rows].long() - 1
    positions: Tensor = runner.positions[ends].long()
    return positions


@contextmanager
def drawn_by(runner: Any, draws: StepDraws) -> Iterator[None]:
    """Let vLLM's samplers hand every token they draw to `draws`, within the block."""
    import torch
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    sampler, verifier = runner.sampler.topk_topp_sampler, getattr(runner, "rejection_sampler", None)
    drawn, compared = sampler.forward, rejection_sampler.rejection_sample

    def forward(logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None) -> Any:
        # With a generator in the batch vLLM's draw is this filter and its own noise, on every device.
        logits = apply_top_k_top_p(logits, k, p)
        if draws.draws_all and not str(sampler.logprobs_mode).startswith("processed"):
            tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
            if draws.put(logits, tokens):
                return tokens, None
        tokens, told = drawn(logits, generators, None, None)
        draws.put(logits, tokens)
        return tokens, told

    def rejection_sample(
        drafts: Tensor, counts: list[int], longest: int, ends: Tensor, q: Any, logits: Tensor, bonus: Tensor,
        *rest: Any, **named: Any,
    ) -> Tensor:  # fmt: skip
        is_lossy = named.get("synthetic_mode") or named.get("fly_window_size") is not None  # the latter in vLLM 0.33
        if draws.draws_all and not is_lossy:
            output = torch.full((len(counts), longest + 1), -1, dtype=torch.int32, device=logits.device)
            if draws.compare(logits, drafts, bonus, output):
                return output
        output = compared(drafts, counts, longest, ends, q, logits, bonus, *rest, **named)
        if not is_lossy:  # else answers are not the target's anyway
            draws.compare(logits, drafts, bonus, output)
        return output

    with ExitStack() as undo:
        undo.enter_context(_put(sampler, "forward", forward))
        undo.enter_context(_put(rejection_sampler, "rejection_sample", rejection_sample))
        if verifier is not None:
            verify = verifier.forward

            def verifier_forward(metadata: Any, *rest: Any, **named: Any) -> Any:
                draws.tests = metadata.num_draft_tokens
                return verify(metadata, *rest, **named)

            undo.enter_context(_put(verifier, "forward", verifier_forward))
        yield


@contextmanager
def _put(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute of a module or object be `value`, within the block."""
    own = vars(owner)
    was_own, whole = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, whole)
        else:
            delattr(owner, name)
