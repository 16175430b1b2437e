"""Record what exit heads learn from: the target's states behind some layers, beside what became of each draft token.

Runs a real vLLM engine with the user's target and drafter over the shipped prompts. Every draft is verified in full;
the states of the rows that test a token are copied on their way. Nothing is pruned.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from ...engine_adapter.errors import ModelError
from ...engine_adapter.pruning.forward import Pruning
from ...engine_adapter.pruning.verdict import TokenHeads
from ...env.workload.prompts import Prompt
from ..embedded.precision import dtype_on

Tensor = torch.Tensor
Progress = Callable[[int, int], None]
LONGEST_PROMPT_TOKENS: Final = 400


class ExitTrainingError(ModelError):
    """An input that is refused before work starts; the CLI prints its line."""


@dataclass(slots=True)
class Recording:
    """One row per verified draft token, in the order of the engine's steps."""

    states: dict[int, Tensor]  # layer -> (tokens, hidden size) bfloat16, residual stream behind the layer
    tokens: Tensor  # (tokens,) draft token ids
    candidates: Tensor  # (tokens, candidates)
    confidences: Tensor  # (tokens,)
    positions: Tensor  # (tokens,) 1 is a draft's first
    is_accepted: Tensor  # (tokens,) bool: the target's own choice in this row is the draft token
    drafts: Tensor  # (drafts,) tokens of each draft, in order
    steps: Tensor  # (steps, 3) float64: rows, seconds of the forward pass, seconds with LM head and sampler
    layers: int  # of the target
    lm_head: Tensor  # (vocabulary, hidden size)
    norm: Tensor  # (hidden size,) weight of the last norm

    def is_reached(self) -> Tensor:
        """Return (tokens,) whether every earlier token of the draft was accepted: these decide what is emitted."""
        reached, start = torch.ones(len(self.tokens), dtype=torch.bool), 0
        for count in self.drafts.tolist():
            accepted = self.is_accepted[start : start + count].cumprod(0)
            reached[start + 1 : start + count] = accepted[:-1] > 0
            start += count
        return reached


class _Recorder(Pruning):
    """Stands where `Pruning` stands, and copies instead of cutting."""

    def __init__(self, runner: Any, layers: Sequence[int], candidates: int) -> None:
        super().__init__(runner, _NoHeads(tuple(layers), candidates))
        self._layers = layers
        self.rows: list[dict[str, Tensor]] = []
        self.states: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        self._started_s = self._forward_s = 0.0

    def take(self) -> tuple[list[dict[str, Tensor]], dict[int, list[Tensor]]]:
        """Return what was recorded so far and begin anew; a step that was not sampled is left out."""
        rows, states = self.rows, self.states
        self.rows, self.states = [], {layer: [] for layer in self._layers}
        whole = [place for place, row in enumerate(rows) if "is_accepted" in row]
        kept = {layer: [parts[place] for place in whole] for layer, parts in states.items()}
        return [rows[place] for place in whole], kept

    def obeys(self, prune: Any) -> bool:
        return True  # no lease is needed to record

    def open(self, prune: Any, metadata: Any, common: Any, notes: Any) -> bool:
        self.cut = None
        if metadata is None or notes is None or not any(metadata.num_draft_tokens):
            self._step = None
            return False
        from ...engine_adapter.protocol import Prune
        from ...engine_adapter.pruning.forward import _VerifiedStep

        self._step = _VerifiedStep(
            Prune(self._layers[0], 0.0), metadata, common, notes, list(self._runner.input_batch.req_ids)
        )
        return not bool(self._step.batch.spared.any())

    @contextmanager
    def attached(self) -> Iterator[None]:
        layers = self._decoder_layers
        handles = [layers[number].register_forward_pre_hook(self._copier(number)) for number in self._layers]
        self._started_s = time.perf_counter()
        try:
            yield
        finally:
            self._forward_s = time.perf_counter() - self._started_s
            for handle in handles:
                handle.remove()

    def _copier(self, number: int) -> Callable[..., None]:
        def copy(_layer: Any, arguments: tuple[Any, ...]) -> None:
            assert self._step is not None
            checks = self._checks(self._step, arguments[1], arguments[2])
            self.states[number].append(checks.states.to(torch.bfloat16, copy=True))  # else the next step writes to it
            if number == self._layers[0]:
                assert checks.candidates is not None
                assert checks.confidences is not None
                self.rows.append(
                    {
                        "tokens": checks.tokens.clone(),
                        "candidates": checks.candidates.to(torch.int32),
                        "confidences": checks.confidences.clone(),
                        "positions": checks.positions,
                        "drafts": torch.tensor([count for count in self._step.batch.drafts.tolist() if count]),
                    }
                )

        return copy

    def sample(self, sample: Callable[[Any, Any], Any], logits: Any, metadata: Any) -> Any:
        if self._step is not None and metadata is not None and len(self.rows) and "is_accepted" not in self.rows[-1]:
            best = logits[metadata.target_logits_indices].max(-1).indices
            self.rows[-1]["is_accepted"] = best == metadata.draft_token_ids
        output = sample(logits, metadata)
        if self._step is not None and self.rows:
            took = [int(self._step.batch.lengths.sum()), self._forward_s, time.perf_counter() - self._started_s]
            self.rows[-1]["steps"] = torch.tensor([took], dtype=torch.float64)
        return output


class _NoHeads(TokenHeads):
    """Lets everything pass: a recording sees whole steps."""

    def __init__(self, layers: tuple[int, ...], candidates: int) -> None:
        self.layers, self.candidates = layers, candidates

    def passes(self, layer: int, threshold: float, checks: Any) -> Any:
        return np.ones(len(checks.tokens), dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class ExitRecipe:
    """How to record."""

    target: Path
    drafter: Path
    method: str = "eagle3"
    layers: tuple[int, ...] = ()  # empty: a third, a half, two thirds and five sixths of the target's
    candidates: int = 8
    longest: int = 7  # tokens of a draft
    batch: int = 16
    answer_tokens: int = 96
    tokens: int = 30_000  # draft tokens to record for training, about


Side = tuple[Sequence[Prompt], int]  # prompts, and about how many draft tokens to record of their answers


def record(recipe: ExitRecipe, sides: Sequence[Side], progress: Progress) -> list[Recording]:
    """Answer prompts of each side until enough draft tokens were seen."""
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "FASER_ENDPOINT": f"ipc://{folder}/e.sock",
            "FASER_DEFAULT_K": str(recipe.longest),
            "FASER_CONFIDENCE": "1",
            "FASER_EXIT_HEADS": "",
        }
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        return _record(recipe, sides, progress)


def _record(recipe: ExitRecipe, sides: Sequence[Side], progress: Progress) -> list[Recording]:
    try:
        from vllm import LLM
    except ImportError as error:
        raise ExitTrainingError(f"vLLM is not installed ({error}); install faser-vllm[cpu] or vLLM") from error
    engine = LLM(
        str(recipe.target),
        dtype=dtype_on("cuda" if torch.cuda.is_available() else "cpu"),
        enforce_eager=True,
        max_model_len=LONGEST_PROMPT_TOKENS + recipe.answer_tokens + 16,
        max_num_seqs=recipe.batch,
        enable_prefix_caching=False,
        seed=0,
        scheduler_cls="faser.engine_adapter.scheduler.FaserScheduler",
        worker_cls="faser.engine_adapter.worker.FaserWorker",
        speculative_config={
            "method": recipe.method, "model": str(recipe.drafter), "num_speculative_tokens": recipe.longest,
        },
    )  # fmt: skip
    executor: Any = engine.llm_engine.model_executor
    runner = executor.driver_worker.worker.model_runner
    depth = int(runner.get_model().config.num_hidden_layers)
    layers = recipe.layers or default_layers(depth)
    if not all(0 < layer < depth for layer in layers):
        raise ExitTrainingError(f"layers {layers}: the target has {depth}; expected 1 to {depth - 1}")
    runner.pruning = recorder = _Recorder(runner, layers, recipe.candidates)
    recordings = []
    for prompts, tokens in sides:
        _answer(engine, recipe, recorder, prompts, tokens, progress)
        recordings.append(_joined(recorder, depth, runner.get_model()))
    return recordings


def _answer(
    engine: Any, recipe: ExitRecipe, recorder: _Recorder, prompts: Sequence[Prompt], tokens: int, progress: Progress
) -> None:
    from vllm import SamplingParams

    short = [prompt for prompt in prompts if prompt.tokens <= LONGEST_PROMPT_TOKENS - 40]
    answer = SamplingParams(temperature=0.0, max_tokens=recipe.answer_tokens)
    for start in range(0, len(short), recipe.batch):
        group = short[start : start + recipe.batch]
        engine.chat([[{"role": "user", "content": prompt.text}] for prompt in group], answer, use_tqdm=False)
        seen = sum(len(rows["tokens"]) for rows in recorder.rows)
        progress(min(seen, tokens), tokens)
        if seen >= tokens:
            return
    if not recorder.rows:
        raise ExitTrainingError(
            "the drafter proposed nothing that could be recorded; expected a draft model or EAGLE head"
        )


def default_layers(depth: int) -> tuple[int, ...]:
    """Return the layers to train heads behind when none are named."""
    return tuple(sorted({max(1, round(depth * share)) for share in (1 / 3, 1 / 2, 2 / 3, 5 / 6)}))


def _joined(recorder: _Recorder, depth: int, model: Any) -> Recording:
    rows, states = recorder.take()
    names = [field.name for field in fields(Recording) if field.name in rows[0]]
    return Recording(
        states={layer: torch.cat(parts).cpu() for layer, parts in states.items()},
        layers=depth,
        lm_head=model.lm_head.weight[: model.config.vocab_size].detach().cpu().clone(),
        norm=model.model.norm.weight.detach().cpu().clone(),
        **{name: torch.cat([row[name] for row in rows]).cpu() for name in names},
    )
