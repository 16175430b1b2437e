"""Text to distil from: the target answers the shipped training prompts and turns of its own, with vLLM.

Called by the workshop when the recipe names no corpus. It appends to a .jsonl and goes on where it was stopped.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...env.workload.prompts import training_prompts
from ..embedded.precision import dtype_on
from .corpus import ChatFormat
from .drafter_error import DrafterError
from .recipe import Recipe

Progress = Callable[[int, int], None]
TEMPERATURES: Final = (0.0, 0.0, 0.7, 1.0)
LONGEST_PROMPT_TOKENS: Final = 600
_TURN_TOKENS: Final = 64
# Openings steer what the target asks itself; most are empty, so that it chooses (Magpie, Xu et al. 2024).
_OPENINGS: Final = (
    *[""] * 8,
    *("What", "How", "Why", "Write a", "Write a Python", "Explain", "Can you", "I need", "Give me", "Summarize"),
    *("Describe", "List", "Rewrite", "Create", "Tell me about", "Who was", "Solve", "Compare", "In", "The", "If"),
)


class UserTurn(NamedTuple):
    """A user turn and where it comes from."""

    text: str
    source: str


def generate_corpus(recipe: Recipe, target: Path, chat: ChatFormat, output: Path, progress: Progress) -> Path:
    """Fill `output` up to the recipe's number of conversations."""
    output.parent.mkdir(parents=True, exist_ok=True)
    done = _complete_lines(output)
    if done >= recipe.generate_conversations:
        return output
    prompts = shipped_turns(recipe)
    engine = _engine(recipe, target)
    draw = random.Random(f"{recipe.seed} {done}")
    with output.open("a") as file:
        while done < recipe.generate_conversations:
            count = min(recipe.generate_at_once, recipe.generate_conversations - done)
            given = prompts[done : done + count]
            own = _own_turns(engine, chat, draw, count - len(given))
            for line in _answers(engine, recipe, chat, draw, [*given, *own]):
                file.write(json.dumps(line) + "\n")
            file.flush()
            done += count
            progress(done, recipe.generate_conversations)
    return output


def shipped_turns(recipe: Recipe) -> list[UserTurn]:
    """List the shipped training prompts, each as often as the recipe wants it answered, in a seeded order."""
    turns = [UserTurn(p.text, p.source) for p in training_prompts() if p.tokens <= LONGEST_PROMPT_TOKENS]
    turns *= recipe.generate_answers
    random.Random(recipe.seed).shuffle(turns)
    return turns


def _complete_lines(path: Path) -> int:
    """Count whole lines and cut off a half-written last one."""
    if not path.exists():
        return 0
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) != len(raw):
        path.write_bytes(whole)
    return whole.count(b"\n")


def _engine(recipe: Recipe, target: Path) -> Any:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        from vllm import LLM
    except ImportError as error:
        raise DrafterError(f"no corpus given and vLLM is not installed ({error}); name a corpus") from error
    return LLM(
        str(target),
        dtype=dtype_on(recipe.device),
        max_model_len=LONGEST_PROMPT_TOKENS + recipe.generate_answer_tokens + 64,
        max_num_seqs=recipe.generate_at_once,
        enforce_eager=recipe.device == "cpu",
        seed=recipe.seed,
    )


def _own_turns(engine: Any, chat: ChatFormat, draw: random.Random, count: int) -> list[UserTurn]:
    """Let the target continue an opened user turn."""
    from vllm import SamplingParams

    if not count:
        return []
    openings = [draw.choice(_OPENINGS) for _ in range(count)]
    asking = SamplingParams(temperature=1.0, top_p=0.97, max_tokens=_TURN_TOKENS)
    asked: Sequence[Any] = engine.generate([chat.before + opening for opening in openings], asking, use_tqdm=False)
    return [UserTurn(opening + out.outputs[0].text, "self") for opening, out in zip(openings, asked, strict=True)]


def _answers(
    engine: Any, recipe: Recipe, chat: ChatFormat, draw: random.Random, turns: Sequence[UserTurn]
) -> list[dict[str, object]]:
    from vllm import SamplingParams

    heat = [draw.choice(TEMPERATURES) for _ in turns]
    settings = [SamplingParams(temperature=degree, max_tokens=recipe.generate_answer_tokens) for degree in heat]
    answers: Sequence[Any] = engine.generate([chat.wrap(turn.text) for turn in turns], settings, use_tqdm=False)
    return [
        {"p": list(out.prompt_token_ids), "g": list(out.outputs[0].token_ids), "T": degree, "source": turn.source}
        for out, degree, turn in zip(answers, heat, turns, strict=True)
    ]
