"""What words that repeat themselves are worth as drafts: `python benchmarks/matches.py --out FILE [--prompts 40]`.

The embedded target answers prompts by itself, greedily and at T = 0.7. Then each answer is drafted from what it said
before (engine_adapter/matching), token by token. On training prompts this fits the four numbers of
engine_adapter/matching/text_kernel.py; on held-out ones it says, for each kind, how often there is a match, how often
its first token is right, how well the fitted chances are calibrated, and how many tokens a step gives when every match
is verified while its survival is above `KEEP`. No drafter and no clock are involved.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from faser.env.workload.prompts import KINDS, Prompt, held_out_prompts, training_prompts
from faser.models.embedded.pair import ensure_embedded_target
from faser.models.embedded.precision import dtype_on

LONGEST: Final = 8  # tokens of a copy
KEEP: Final = 0.15  # survival
TOKENS: Final = 128  # of an answer
TEMPERATURES: Final = (0.0, 0.7)


@dataclass(frozen=True, slots=True)
class Answer:
    """Token ids of a prompt and what was said to it."""

    kind: str
    prompt: list[int]
    said: list[int]


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of held-out prompts at one temperature."""

    kind: str
    temperature: float
    steps: int
    share: float  # of tokens before which there was a match
    first_right: float  # of these matches
    calibration_error: float  # mean distance of told and true chances, by tenths
    tokens_per_step: float
    copied_right: float  # of verified tokens


def answers_of(engine: Any, prompts: Sequence[Prompt], temperature: float) -> list[Answer]:
    """Let the target answer."""
    from vllm import SamplingParams

    chats = [[{"role": "user", "content": prompt.text}] for prompt in prompts]
    outputs = engine.chat(chats, SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=0), use_tqdm=False)
    return [
        Answer(prompt.kind, list(output.prompt_token_ids), list(output.outputs[0].token_ids))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def features(answer: Answer) -> Iterator[tuple[int, list[float], bool]]:
    """Yield for each token of each match: its place in the draft, what its chance is told by, and whether it is right.

    As far as the first wrong one: behind it nothing is tested.
    """
    from faser.engine_adapter.matching import text_kernel as kernel
    from faser.engine_adapter.matching.texts import Texts

    texts, tokens = Texts(1 << 24), np.array(answer.prompt + answer.said, np.int32)
    for end in range(len(answer.prompt) + 1, len(tokens)):
        drafts = texts.find(["it"], [tokens[: end - 1]], tokens[None, end - 1 : end], np.array([LONGEST]))
        memory, text = texts._memory, texts._texts["it"]
        place = np.array([text.begin, text.capacity, text.size])
        at, length, agreed, others = kernel._look_up(memory.tokens, memory.table, place, place)
        for step in range(min(int(drafts.lengths[0]), len(tokens) - end)):
            longer = min(length + step, kernel.LONGEST)
            if step > 0 and at + step < end:
                agreed, others = kernel._agreement(memory.tokens, memory.table, place, at + step, longer)
            is_right = bool(drafts.tokens[0, step] == tokens[end + step])
            yield step, [1.0, float(np.log(longer)), float(np.log(agreed)), float(np.log(1 + others))], is_right
            if not is_right:
                break


def fitted(answers: Sequence[Answer]) -> list[float]:
    """Return the four numbers by logistic regression (Newton's method)."""
    told = [(row, is_right) for answer in answers for _, row, is_right in features(answer)]
    rows, right = np.array([row for row, _ in told]), np.array([is_right for _, is_right in told], float)
    weights = np.zeros(rows.shape[1])
    for _ in range(25):
        chance = 1.0 / (1.0 + np.exp(-rows @ weights))
        curvature = (rows * (chance * (1.0 - chance))[:, None]).T @ rows
        weights += np.linalg.solve(curvature, rows.T @ (right - chance))
    return [float(weight) for weight in weights]


def judged(kind: str, temperature: float, answers: Sequence[Answer]) -> Row:
    """Return what copies alone would do for these answers, at the numbers that are in force."""
    from faser.engine_adapter.matching import text_kernel as kernel

    numbers = np.array([kernel.BASE, kernel.BY_LENGTH, kernel.BY_AGREED, kernel.BY_OTHERS])
    told = [each for answer in answers for each in features(answer)]
    chance = 1.0 / (1.0 + np.exp(-np.array([row for _, row, _ in told]) @ numbers))
    right, place = np.array([is_right for *_, is_right in told]), np.array([step for step, *_ in told])
    tenth = np.minimum((chance * 10).astype(int), 9)
    gaps = [abs(chance[tenth == each].mean() - right[tenth == each].mean()) * (tenth == each).mean()
            for each in range(10) if (tenth == each).any()]  # fmt: skip
    said = sum(len(answer.said) - 1 for answer in answers)
    steps, copied, hits = served(answers)
    return Row(
        kind, temperature, said, float((place == 0).sum() / said), float(right[place == 0].mean()), float(sum(gaps)),
        1.0 + hits / steps, hits / max(copied, 1),
    )  # fmt: skip


def served(answers: Sequence[Answer]) -> tuple[int, int, int]:
    """Return the steps in which copies alone serve these answers, tokens they verify, and those that are right."""
    from faser.engine_adapter.matching.texts import Texts, kept_of

    curve = np.ones(LONGEST), np.zeros(LONGEST), np.full((1, LONGEST), KEEP)
    steps = copied = hits = 0
    for answer in answers:
        texts, tokens, end = Texts(1 << 24), np.array(answer.prompt + answer.said, np.int32), len(answer.prompt) + 1
        while end < len(tokens):
            drafts = texts.find(["it"], [tokens[: end - 1]], tokens[None, end - 1 : end], np.array([LONGEST]))
            kept = int(kept_of(drafts, *curve)[0][0])
            follows = tokens[end : end + kept]
            is_same = drafts.tokens[0, : len(follows)] == follows
            right = int(np.cumprod(is_same).sum())
            steps, copied, hits = steps + 1, copied + kept, hits + right
            end += right + 1
    return steps, copied, hits


def main() -> None:
    """Print a line for each kind and temperature, and write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=40, help="of each kind")
    parser.add_argument("--answers", type=Path, help="keep the answers to held-out prompts here, for sources.py")
    arguments = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    engine = LLM(str(ensure_embedded_target()), dtype=dtype_on("cpu"), enforce_eager=True, max_num_seqs=32, seed=0)
    few = arguments.prompts
    known = [prompt for kind in KINDS for prompt in training_prompts([kind])[:few]]
    result: dict[str, Any] = {"prompts": few, "tokens": TOKENS, "longest": LONGEST, "keep": KEEP, "rows": []}
    result["numbers"] = fitted(answers_of(engine, known, 0.0))
    print("fitted", *(f"{number:.2f}" for number in result["numbers"]), flush=True)
    kept: list[dict[str, Any]] = []
    for temperature in TEMPERATURES:
        every: list[Answer] = []
        for kind in KINDS:
            answers = answers_of(engine, held_out_prompts([kind])[:few], temperature)
            every += answers
            result["rows"].append(asdict(judged(kind, temperature, answers)))
            print(
                *(f"{value:.3f}" if isinstance(value, float) else value for value in result["rows"][-1].values()),
                flush=True,
            )
        kept += [asdict(answer) | {"temperature": temperature} for answer in every]
        result["rows"].append(asdict(judged("all", temperature, every)))
        print(
            *(f"{value:.3f}" if isinstance(value, float) else value for value in result["rows"][-1].values()),
            flush=True,
        )
    if arguments.answers:
        arguments.answers.write_text(json.dumps(kept))
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
