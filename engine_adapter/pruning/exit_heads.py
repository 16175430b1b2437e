"""Trained exit heads: how likely the target accepts a draft token, seen from its own state behind a layer.

The state, normed and moved by a trained affine map (diagonal and low rank), is compared with the LM head's rows of the
drafter's candidates only; a handful of features of those scores, of the drafter and of the state go through a logistic
curve. `models/exits/` trains with these very functions. The reference implementation: plain torch, any device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .exit_file import ExitError, check_model, read_facts
from .head_math import LEAST, NOWHERE, Head, moved, normed
from .verdict import TokenHeads, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from ..arrays import Bools
    from .cut import CutBatch
    from .verdict import Checks

FEATURES: Final = ("log_share", "margin", "rank", "entropy", "confidence_logit", "position", "probe")


TENSORS: Final = ("scale", "down", "up", "bias", "probe")  # of the target's type; the weights stay float32


def candidate_scores(moved_states: Tensor, rows: Tensor) -> Tensor:
    """Return scores (rows, candidates) of LM-head rows (rows, candidates, hidden size)."""
    return (rows @ moved_states[:, :, None])[:, :, 0].float()


def features(scores: Tensor, is_draft: Tensor, confidences: Tensor, positions: Tensor, probes: Tensor) -> Tensor:
    """Return FEATURES (tokens, features).

    :param probes: (tokens,) the states along the head's probe.
    :param scores: (tokens, 1 + candidates), the draft token's own first.
    :param is_draft: (tokens, candidates) whether a candidate is the draft token itself, which then counts once.
    """
    import torch

    own, others = scores[:, :1], scores[:, 1:].masked_fill(is_draft, NOWHERE)
    shares = torch.log_softmax(torch.cat([own, others], dim=1), dim=1)
    entropy = -(shares * shares.exp()).sum(1)
    margin = (own[:, 0] - others.max(dim=1).values).clamp(-30.0, 30.0)
    sure = confidences.float().clamp(LEAST, 1.0 - LEAST)
    columns = (
        shares[:, 0].clamp(min=-30.0), margin, (others > own).sum(1).float(), entropy,
        torch.log(sure / (1.0 - sure)), positions.float(), probes.float(),
    )  # fmt: skip
    return torch.stack(columns, dim=1)


class ExitHeads(TokenHeads):
    """The heads of one file, on the target's device, beside the target's own LM head."""

    def __init__(self, heads: dict[int, Head], lm_head: Tensor, candidates: int) -> None:
        self.layers = tuple(sorted(heads))
        self.candidates = candidates
        self._heads = heads
        self._lm_head = lm_head

    def passes(self, layer: int, threshold: float, checks: Checks) -> Bools:
        """Tell for each token whether its predicted acceptance reaches the threshold."""
        passing: Bools = (self.accepts(layer, checks) >= threshold).cpu().numpy()
        return passing

    def decide(self, layer: int, threshold: float, checks: Checks, batch: CutBatch) -> Verdict:
        """Cut each request behind its first token that does not pass; on CUDA in one launch."""
        if checks.states.is_cuda:
            try:
                from .exit_kernel import decide
            except ImportError:  # a CUDA build without Triton
                return super().decide(layer, threshold, checks, batch)
            return decide(self._heads[layer], self._lm_head, threshold, checks, batch)
        return super().decide(layer, threshold, checks, batch)

    def chances(self, layer: int, threshold: float, checks: Checks) -> Tensor:
        """Return the predicted acceptance (tokens,); on CUDA in one launch, for which nobody waits."""
        if checks.states.is_cuda:
            try:
                from .prefix_kernel import chances
            except ImportError:  # a CUDA build without Triton
                return self.accepts(layer, checks)
            return chances(self._heads[layer], self._lm_head, checks)
        return self.accepts(layer, checks)

    def accepts(self, layer: int, checks: Checks) -> Tensor:
        """Return the predicted acceptance (tokens,)."""
        import torch

        assert checks.candidates is not None
        assert checks.confidences is not None
        head = self._heads[layer]
        tokens = checks.tokens[:, None].long()
        rows = self._lm_head[torch.cat([tokens, checks.candidates], dim=1)]
        states = normed(checks.states)
        scores = candidate_scores(moved(head, states), rows)
        probes = states @ head.probe
        seen = features(scores, checks.candidates == tokens, checks.confidences, checks.positions, probes)
        return torch.sigmoid(seen @ head.weights[:-1] + head.weights[-1])


def load_heads(path: str, model: Any) -> ExitHeads:
    """Return the heads of a file for vLLM's model; raise ExitError if they are another model's."""
    from safetensors.torch import load_file

    facts = read_facts(path)
    lm_head: Tensor | None = getattr(model.lm_head, "weight", None)
    if lm_head is None:
        raise ExitError(f"{path}: the target's LM head has no plain weights to take candidates from")
    text = model.config
    check_model(path, facts, text.num_hidden_layers, text.hidden_size, text.vocab_size)
    tensors = load_file(path, device=str(lm_head.device))
    expected = lm_head[: tensors["fingerprint"].shape[0], : tensors["fingerprint"].shape[1]].float()
    if not expected.allclose(tensors["fingerprint"].float(), rtol=0.02, atol=1e-3):
        raise ExitError(f"{path} was trained on another model of the same shape; train its own: `faser exits train`")
    heads = {}
    for layer in facts.layers:
        typed = {name: tensors[f"{layer}.{name}"].to(lm_head.dtype) for name in TENSORS}
        heads[layer] = Head(**typed, weights=tensors[f"{layer}.weights"].float())
    return ExitHeads(heads, lm_head, facts.candidates)
