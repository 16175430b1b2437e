"""The conversations a drafter learns from: the target's own answers as token ids, split by prompt.

`faser drafter train` and the feature cache read them. Only conversations on the training side of `env.split` may ever
reach the optimiser; the other side is for evaluation.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...env.workload.held_out import is_training_prompt
from .drafter_error import DrafterError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MINIMUM_ANSWER_TOKENS = 8
_MARK = "faser-user-turn"


@dataclass(frozen=True, slots=True)
class Conversation:
    """One prompt with chat template and the target's answer, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float
    source: str
    is_training: bool

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What the target's chat template puts before and after a single user turn."""

    before: str
    after: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        """Read the format off the template; refuse a tokenizer without one."""
        turn = [{"role": "user", "content": _MARK}]
        try:
            text = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
        except ValueError as error:
            raise DrafterError(f"the target's tokenizer: {error}; expected one with a chat template") from error
        before, found, after = text.partition(_MARK)
        if not found:
            raise DrafterError("the target's chat template drops the user's turn; expected it in the prompt")
        return cls(before, after)

    def wrap(self, user_turn: str) -> str:
        return self.before + user_turn + self.after

    def unwrap(self, prompt: str) -> str | None:
        """Cut the user's turn out of a prompt; None when the prompt is not of this format."""
        long_enough = len(prompt) >= len(self.before) + len(self.after)
        if not (long_enough and prompt.startswith(self.before) and prompt.endswith(self.after)):
            return None
        return prompt[len(self.before) : len(prompt) - len(self.after)]


def read_corpus(path: Path, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int) -> list[Conversation]:
    """Read a corpus and mark each conversation's side of the split."""
    chat = ChatFormat.of(tokenizer)
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw).decode() if path.suffix == ".gz" else raw.decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DrafterError(f"corpus {path}: {error}; expected .jsonl or .jsonl.gz") from error
    rows = [
        _conversation(line, f"corpus {path} line {number}", chat, tokenizer, vocabulary_size)
        for number, line in enumerate(io.StringIO(text), 1)
        if line.strip()
    ]
    return [row for row in rows if len(row.answer) >= MINIMUM_ANSWER_TOKENS]


def _conversation(
    line: str, where: str, chat: ChatFormat, tokenizer: PreTrainedTokenizerBase, vocabulary_size: int
) -> Conversation:
    try:
        row = json.loads(line)
        prompt, answer = tuple(map(int, row["p"])), tuple(map(int, row["g"]))
        temperature, source = float(row["T"]), str(row.get("source", "self"))
    except (ValueError, KeyError, TypeError) as error:
        raise DrafterError(f"{where}: {error!r}; expected an object with p, g (token ids) and T") from error
    if not prompt or not all(0 <= token < vocabulary_size for token in prompt + answer):
        raise DrafterError(f"{where}: token ids outside the target's vocabulary of {vocabulary_size}; another model's")
    turn = chat.unwrap(str(tokenizer.decode(list(prompt))))
    if turn is None:
        raise DrafterError(
            f"{where}: the prompt is not in the target's chat format; was it made with another tokenizer or template?"
        )
    return Conversation(prompt, answer, temperature, source, is_training_prompt(turn))


def corpus_digest(conversations: Iterable[Conversation]) -> str:
    """Identify a corpus by the token ids it holds, in order."""
    digest = hashlib.sha256()
    for row in conversations:
        digest.update(repr((row.prompt, row.answer, row.temperature)).encode())
    return digest.hexdigest()


def response_tokens(conversations: Iterable[Conversation]) -> int:
    """Count the answers' tokens."""
    return sum(len(row.answer) for row in conversations)


def choose_draft_vocabulary(conversations: Iterable[Conversation], size: int, vocabulary_size: int) -> list[int]:
    """Pick the token ids most frequent in the training side's answers, ascending.

    Answers drawn above T = 0.7 count a quarter: what is served is mostly cooler. Ties and gaps are filled by low ids.
    """
    if size > vocabulary_size:
        raise DrafterError(f"draft_vocabulary {size}: the target has only {vocabulary_size} tokens")
    counts: Counter[int] = Counter()
    for row in conversations:
        if row.is_training:
            weight = 4 if row.temperature <= 0.7 else 1
            for token in row.answer:
                counts[token] += weight
    ranked = sorted(range(vocabulary_size), key=lambda token: (-counts[token], token))
    return sorted(ranked[:size])


def coverage(conversations: Iterable[Conversation], vocabulary: Iterable[int]) -> float:
    """Give the share of answer tokens the draft vocabulary holds: a ceiling of acceptance."""
    known = set(vocabulary)
    tokens = [token for row in conversations for token in row.answer]
    return sum(token in known for token in tokens) / max(1, len(tokens))


def choose_for_training(
    conversations: Iterable[Conversation], seed: int, longest_answer: int, limit_tokens: int
) -> list[Conversation]:
    """Shuffle the training side, cut its answers and the whole behind `limit_tokens` tokens (0: keep all)."""
    order = [
        replace(row, answer=row.answer[: longest_answer or len(row.answer)]) for row in conversations if row.is_training
    ]
    random.Random(seed).shuffle(order)
    kept, size = 0, 0
    while kept < len(order) and (size < limit_tokens or not limit_tokens):
        size += len(order[kept].tokens)
        kept += 1
    return order[:kept]


def choose_for_evaluation(conversations: Iterable[Conversation], seed: int, count: int) -> list[Conversation]:
    """Pick held-out conversations, greedy ones and those at other temperatures up to 0.7 half and half.

    Prompts that people wrote come first: turns the target wrote itself are easier to foresee.
    """
    order = [row for row in conversations if not row.is_training and row.temperature <= 0.7]
    random.Random(seed).shuffle(order)
    order.sort(key=lambda row: row.source == "self")
    greedy = [row for row in order if row.temperature == 0][: (count + 1) // 2]
    return greedy + [row for row in order if row.temperature > 0][: count // 2]
