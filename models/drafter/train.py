"""The training loop: batches from the feature cache, Muon and AdamW, checkpoints, resume.

Called by models/drafter/pipeline.py. It touches nothing but its checkpoint, stops at the end of a step when asked,
and goes on from its checkpoint when it is started again.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as functional
from torch.overrides import TorchFunctionMode

from .drafter_error import DrafterError
from .evaluate import Acceptance, evaluate
from .features import ExampleAddress, FeatureCache
from .network import Batch, DraftHead, pack
from .recipe import Recipe

Tensor = torch.Tensor
_BLOCK_ROWS: Final = 512  # of the loss, whose (rows, vocabulary) logits never exist as a whole


@dataclass(slots=True)
class Position:
    """How far a run has come."""

    step: int = 0
    answer_tokens: int = 0  # answer tokens trained on, repeats counted
    epoch: int = 0
    next_example: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What the run tells while it goes on; `acceptance` only when the head was scored."""

    position: Position
    share_done: float
    loss: float
    depth: int
    acceptance: tuple[Acceptance, ...]


Report = Callable[[TrainingReport], None]


class InFloat32(TorchFunctionMode):
    """Leaves matrices in float32 where torch's Muon (2.13, optim/_muon.py) takes them to bfloat16 to be faster."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.Tensor.bfloat16:
            return arguments[0].clone()
        return function(*arguments, **(named or {}))


class Trainer:
    """One run: a head, its optimisers and its place in the data."""

    def __init__(
        self,
        recipe: Recipe,
        head: DraftHead,
        lm_head: Tensor,
        vocabulary: Tensor,
        train: FeatureCache,
        held_out: FeatureCache,
    ) -> None:
        self.recipe = recipe
        self.head = head
        self.lm_head = lm_head
        self.vocabulary = vocabulary
        self.train_cache = train
        self.held_out = held_out
        self.position = Position()
        self.stop_asked = False
        muon = torch.optim.Muon(
            head.matrices(),
            lr=recipe.matrix_rate,
            weight_decay=recipe.weight_decay,
            momentum=recipe.momentum,
            nesterov=True,
            ns_steps=recipe.newton_schulz_steps,
        )
        adam = torch.optim.AdamW(head.vectors(), lr=recipe.vector_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._optimisers: list[tuple[torch.optim.Optimizer, float]] = [
            (muon, recipe.matrix_rate),
            (adam, recipe.vector_rate),
        ]

    @property
    def share_done(self) -> float:
        return self.position.answer_tokens / self.recipe.tokens

    def run(self, checkpoint: Path, report: Report) -> None:
        """Train to the end of the schedule, or until `stop_asked`; leave a checkpoint either way."""
        losses: list[float] = []
        reported = saved = time.monotonic()
        while self.share_done < 1 and not self.stop_asked:
            losses.append(self.step())
            now = time.monotonic()
            if now - reported > self.recipe.report_s:
                report(self._report(losses, score=True))
                losses, reported = [], time.monotonic()
            elif self.position.step % 20 == 0:
                report(self._report(losses[-20:], score=False))
            if now - saved > self.recipe.checkpoint_s:
                self.save(checkpoint)
                saved = time.monotonic()
        self.save(checkpoint)
        report(self._report(losses, score=not self.stop_asked))

    def step(self) -> float:
        """Take one optimiser step; give the mean loss per row of depth 0..depth-1, weighted."""
        wall, cpu = time.monotonic(), time.process_time()
        batch = pack([self.train_cache.read(address) for address in self._next_addresses()], self.head.device)
        depth = self.recipe.depth_at(self.share_done)
        loss = self.loss(batch, depth)
        for optimiser, _ in self._optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(self.head.parameters.values()), self.recipe.clip)
        factor = self.recipe.rate_at(self.position.step, self.share_done)
        for optimiser, peak in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = peak * factor
            with nullcontext() if self.head.dtype == torch.bfloat16 else InFloat32():
                optimiser.step()
        self.position.step += 1
        self.position.answer_tokens += batch.rows + len(batch.pieces)
        self.position.wall_s += time.monotonic() - wall
        self.position.cpu_s += time.process_time() - cpu
        return float(loss.detach())

    def loss(self, batch: Batch, depth: int) -> Tensor:
        """Give the mean over rows of the teacher's cross-entropy, averaged over depths with falling weight."""
        shares = teacher_shares(batch.top_logits, self.recipe.teacher_temperature)
        total = torch.zeros((), device=self.head.device)
        scale = sum(self.recipe.depth_decay**level for level in range(depth))
        for level, states in enumerate(self.head.unroll(batch, depth)):
            weights = (batch.local_rows >= level).float()
            part = leading_cross_entropy(states, self.lm_head, batch.top_tokens, shares, weights)
            total = total + part / weights.sum().clamp_min(1) * (self.recipe.depth_decay**level / scale)
        return total

    def score(self) -> tuple[Acceptance, ...]:
        """Score the head on the held-out cache."""
        recipe = self.recipe
        return tuple(
            evaluate(
                self.head, self.lm_head, self.vocabulary, self.held_out, recipe.evaluation_depth, recipe.batch_tokens
            )
        )

    def save(self, path: Path) -> None:
        """Write a checkpoint; a reader sees the old one or the new one, never a half."""
        content = {
            "learning": self.recipe.learning_digest(),
            "weights": self.head.weights(),
            "optimisers": [optimiser.state_dict() for optimiser, _ in self._optimisers],
            "position": [getattr(self.position, name) for name in Position.__slots__],
        }
        partial = path.with_suffix(".partial")
        torch.save(content, partial)
        os.replace(partial, path)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint of the same recipe."""
        content = _load_checkpoint(path)
        if content["learning"] != self.recipe.learning_digest():
            raise DrafterError(f"checkpoint {path}: of another recipe; choose another `work` folder or delete it")
        with torch.no_grad():
            for name, weight in content["weights"].items():
                self.head.parameters[name].copy_(weight)
        for (optimiser, _), state in zip(self._optimisers, content["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.position = Position(*content["position"])

    def _next_addresses(self) -> list[ExampleAddress]:
        chosen: list[ExampleAddress] = []
        size = 0
        while size < self.recipe.batch_tokens:
            order = self._order(self.position.epoch)
            if self.position.next_example >= len(order):
                self.position.epoch += 1
                self.position.next_example = 0
                continue
            address = order[self.position.next_example]
            self.position.next_example += 1
            chosen.append(address)
            size += address.length
        return chosen

    def _order(self, epoch: int) -> list[ExampleAddress]:
        if getattr(self, "_ordered_epoch", None) != epoch:
            order = list(self.train_cache.addresses)
            random.Random(f"{self.recipe.seed} {epoch}").shuffle(order)
            self._ordered_epoch, self._ordered = epoch, order
        return self._ordered

    def _report(self, losses: list[float], score: bool) -> TrainingReport:
        return TrainingReport(
            position=self.position,
            share_done=min(1.0, self.share_done),
            loss=sum(losses) / max(1, len(losses)),
            depth=self.recipe.depth_at(self.share_done),
            acceptance=self.score() if score else (),
        )


class _LeadingCrossEntropy(torch.autograd.Function):
    """Computes the gradient of the states in the forward pass, block by block: no logits are kept for the backward."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, tokens: Tensor, shares: Tensor, weights: Tensor) -> Tensor:
        gradient = torch.empty_like(states)
        total = states.new_zeros((), dtype=torch.float32)
        for start in range(0, len(states), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            share, weight = shares[block], weights[block, None]
            guess = functional.linear(states[block], head).softmax(-1)
            log_guess = guess.gather(1, tokens[block]).float().clamp_min(1e-30).log()
            total -= (share * log_guess * weight).sum()
            guess.mul_(weight.to(guess.dtype))
            guess.scatter_add_(1, tokens[block], (-share * weight).to(guess.dtype))
            gradient[block] = guess @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None


def leading_cross_entropy(states: Tensor, head: Tensor, tokens: Tensor, shares: Tensor, weights: Tensor) -> Tensor:
    """Sum the weighted cross-entropy over rows.

    :param states: (rows, hidden), the head's normed output.
    :param head: (draft vocabulary, hidden) of the same type, frozen.
    :param tokens: (rows, top) int64, the teacher's leading draft tokens; `shares` (rows, top) float32 sums to one.
    :param weights: (rows,) float32.
    """
    loss: Tensor = _LeadingCrossEntropy.apply(states, head, tokens, shares, weights)  # type: ignore[no-untyped-call]
    return loss


def teacher_shares(top_logits: Tensor, temperature: float) -> Tensor:
    """Turn the teacher's leading logits (rows, top) into a distribution over them."""
    return (top_logits / temperature).softmax(-1)


def _load_checkpoint(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged zip or pickle raises almost anything
        raise DrafterError(f"checkpoint {path}: {error}; it is damaged, delete it to start anew") from error
    if not {"learning", "weights", "optimisers", "position"} <= set(content):
        raise DrafterError(f"checkpoint {path}: not written by this trainer; delete it to start anew")
    return content
