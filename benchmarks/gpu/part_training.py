"""Drafter training: answer tokens per second of FASER's own trainer, on made-up features of a Qwen3-8B-sized target."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from machines import Machine
from shapes import TARGETS, TINY_TARGETS

LENGTH, PROMPT, TOP, AUX_LAYERS = 512, 128, 64, 3


def measure(machine: Machine) -> dict[str, Any]:
    """Return tokens per second and memory, or why it could not be tried."""
    try:
        from faser.models.drafter.features import Example
        from faser.models.drafter.network import DraftHead, HeadShape
        from faser.models.drafter.recipe import Recipe
        from faser.models.drafter.train import Trainer
    except ImportError as error:
        return {"skipped": f"the trainer needs more than torch: {error}"}
    target = TINY_TARGETS["tiny-target"] if machine.is_dry else TARGETS["qwen3-8b"]
    length, steps = (24, 2) if machine.is_dry else (LENGTH, 12)
    prompt, vocabulary = length // 4, 64 if machine.is_dry else 8192
    shape = HeadShape(
        target.hidden, target.heads, target.kv_heads, target.head_size, target.intermediate, AUX_LAYERS, 1e6, 1e-6
    )
    draw = torch.Generator().manual_seed(5)
    top = min(TOP, vocabulary)
    example = Example(
        torch.randint(vocabulary, (length,), generator=draw, dtype=torch.int32), prompt, 1.0,
        torch.randn(length, AUX_LAYERS * target.hidden, generator=draw).to(torch.bfloat16),
        torch.randint(vocabulary, (length - prompt, top), generator=draw).to(torch.int16),
        torch.randn(length - prompt, top, generator=draw).to(torch.bfloat16),
    )  # fmt: skip
    weights = {name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=draw) * size[-1] ** -0.5
               for name, size in shape.parameters().items()}  # fmt: skip
    embedding = torch.randn(vocabulary, target.hidden, generator=draw).to(machine.device, torch.bfloat16)
    address = SimpleNamespace(length=length)
    cache: Any = SimpleNamespace(addresses=[address] * 64, read=lambda _: example)
    recipe = Recipe(batch_tokens=8 * length, tokens=10**9)
    head = DraftHead(shape, weights, embedding)
    trainer = Trainer(recipe, head, embedding, torch.arange(vocabulary), cache, cache)
    torch.set_grad_enabled(True)
    try:
        return _timed(machine, trainer, steps)
    finally:
        torch.set_grad_enabled(False)


def _timed(machine: Machine, trainer: Any, steps: int) -> dict[str, Any]:
    losses = [trainer.step()]  # the first one makes all buffers
    machine.wait()
    tokens, begun = trainer.position.answer_tokens, time.perf_counter()
    losses += [trainer.step() for _ in range(steps)]
    machine.wait()
    spent = time.perf_counter() - begun
    return {
        "answer_tokens_per_s": round((trainer.position.answer_tokens - tokens) / spent, 1),
        "step_ms": round(1e3 * spent / steps, 3), "batch_tokens": trainer.recipe.batch_tokens,
        "depth": trainer.recipe.depth_at(0.0), "first_loss": losses[0],
        "last_loss": losses[-1], "peak_memory_bytes": 0 if machine.is_dry else torch.cuda.max_memory_allocated(),
    }  # fmt: skip
