"""The feature cache: what the teacher says about every token, computed once and replayed by the trainer.

Layout: `cache.json` (identity) and shards `part-00000.safetensors`. A shard is written whole or not at all, so that an
interrupted caching goes on where it stopped. It is read through memory maps; the trainer never changes it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.nn.functional as functional
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .corpus import Conversation
from .drafter_error import DrafterError
from .teacher import Teacher

Tensor = torch.Tensor
Progress = Callable[[int, int], None]
ROWS_PER_SHARD: Final = 96
GREEDY_AGREEMENT: Final = 0.9


class CacheIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What the features depend on; any difference makes a cache unusable."""

    target: str
    corpus: str
    aux_layers: tuple[int, ...]
    teacher_top: int
    draft_vocabulary: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation with its teacher's features, read from a shard."""

    tokens: Tensor  # (n,) int32
    prompt_tokens: int
    temperature: float
    aux: Tensor  # (n, layers x hidden) bfloat16, each layer at root mean square one
    top_tokens: Tensor  # (answer, top) int16: indices into the draft vocabulary
    top_logits: Tensor  # (answer, top) bfloat16: teacher's logits for the answer's tokens, falling


@dataclass(frozen=True, slots=True)
class ExampleAddress:
    """Where one conversation lies in its shard."""

    shard: int
    start: int
    stop: int
    answer_start: int
    answer_stop: int
    temperature: float

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def answer_length(self) -> int:
        return self.answer_stop - self.answer_start


class FeatureCache:
    """Shards on disk, opened as memory maps."""

    def __init__(self, folder: Path, identity: CacheIdentity) -> None:
        self.folder = folder
        self.identity = identity
        self._open: list[Any] = []
        self.addresses: list[ExampleAddress] = []
        for path in sorted(folder.glob("part-*.safetensors")):
            self._add(path)

    def _add(self, path: Path) -> None:
        shard: Any = safe_open(str(path), framework="pt")
        index = shard.get_tensor("index").tolist()
        start = answer = 0
        for length, prompt, temperature in index:
            stop, answer_stop = start + int(length), answer + int(length) - int(prompt)
            self.addresses.append(ExampleAddress(len(self._open), start, stop, answer, answer_stop, temperature))
            start, answer = stop, answer_stop
        self._open.append(shard)

    def read(self, address: ExampleAddress) -> Example:
        shard = self._open[address.shard]
        rows, answers = slice(address.start, address.stop), slice(address.answer_start, address.answer_stop)
        return Example(
            tokens=shard.get_slice("tokens")[rows],
            prompt_tokens=address.length - address.answer_length,
            temperature=address.temperature,
            aux=shard.get_slice("aux")[rows],
            top_tokens=shard.get_slice("top_tokens")[answers],
            top_logits=shard.get_slice("top_logits")[answers],
        )


def build_cache(
    folder: Path,
    identity: CacheIdentity,
    teacher: Teacher,
    conversations: Sequence[Conversation],
    batch_tokens: int,
    progress: Progress,
) -> FeatureCache:
    """Compute what is missing of a cache over `conversations`, in their order, and open it."""
    _claim(folder, identity)
    chunks = [conversations[at : at + ROWS_PER_SHARD] for at in range(0, len(conversations), ROWS_PER_SHARD)]
    missing = [(n, chunk) for n, chunk in enumerate(chunks) if not _shard_path(folder, n).exists()]
    total = sum(len(row.tokens) for row in conversations)
    done = total - sum(len(row.tokens) for _, chunk in missing for row in chunk)
    for number, chunk in missing:
        tensors = _features(teacher, identity, chunk, batch_tokens)
        partial = _shard_path(folder, number).with_suffix(".partial")
        save_file(tensors, str(partial))
        os.replace(partial, _shard_path(folder, number))
        done += sum(len(row.tokens) for row in chunk)
        progress(done, total)
    return FeatureCache(folder, identity)


def open_cache(folder: Path) -> FeatureCache:
    """Open a cache that was built before."""
    try:
        identity = msgspec.json.decode((folder / "cache.json").read_bytes(), type=CacheIdentity)
        return FeatureCache(folder, identity)
    except (OSError, msgspec.DecodeError, SafetensorError) as error:
        raise DrafterError(f"feature cache {folder}: {error}; delete the folder to build it anew") from error


def check_corpus_is_targets(teacher: Teacher, conversations: Sequence[Conversation]) -> float:
    """Refuse a corpus whose greedy answers are not what this target says; give the share of agreement."""
    greedy = [row for row in conversations if row.temperature == 0][:8]
    if not greedy:
        return 1.0
    agreed = seen = 0
    for row in greedy:
        _, final = teacher.hidden_states([row.tokens], [1])
        best = functional.linear(final[0, len(row.prompt) - 1 : -1], teacher.head).argmax(-1).cpu()
        agreed += int((best == torch.tensor(row.answer)).sum())
        seen += len(row.answer)
    share = agreed / seen
    if share < GREEDY_AGREEMENT:
        raise DrafterError(
            f"the corpus's greedy answers agree with target {teacher.folder} on {share:.0%} of tokens; expected "
            f"{GREEDY_AGREEMENT:.0%} or more: it was written by another model, or with another tokenizer"
        )
    return share


def _claim(folder: Path, identity: CacheIdentity) -> None:
    path = folder / "cache.json"
    if path.exists():
        if open_cache(folder).identity != identity:
            raise DrafterError(
                f"feature cache {folder} was made from another target, corpus or recipe; choose another `work` folder"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(identity))


def check_space(folder: Path, row_bytes: int, tokens: int) -> None:
    """Refuse a disk that cannot hold the features of so many tokens; `row_bytes` as from `bytes_per_token`."""
    folder.mkdir(parents=True, exist_ok=True)
    needed = int(1.05 * row_bytes * tokens)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DrafterError(
            f"feature cache in {folder}: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
            "choose another `work` folder or set cache_tokens"
        )


def bytes_per_token(hidden_size: int, aux_layers: int, teacher_top: int) -> int:
    """Give what one token takes in the cache."""
    return 2 * hidden_size * aux_layers + 4 + 4 * teacher_top


def missing_tokens(folder: Path, conversations: Sequence[Conversation]) -> int:
    """Count the tokens of the shards that a cache in `folder` still lacks."""
    chunks = (conversations[at : at + ROWS_PER_SHARD] for at in range(0, len(conversations), ROWS_PER_SHARD))
    return sum(
        len(row.tokens) for n, chunk in enumerate(chunks) if not _shard_path(folder, n).exists() for row in chunk
    )


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.safetensors"


def batches_by_length(lengths: Sequence[int], padded_tokens: int) -> Iterator[list[int]]:
    """Group indices of similar length so that rows x longest stays within `padded_tokens`."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > padded_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _features(
    teacher: Teacher, identity: CacheIdentity, rows: Sequence[Conversation], batch_tokens: int
) -> dict[str, Tensor]:
    head = teacher.head[torch.tensor(identity.draft_vocabulary, device=teacher.device)]
    aux: dict[int, Tensor] = {}
    top: dict[int, tuple[Tensor, Tensor]] = {}
    for batch in batches_by_length([len(row.tokens) for row in rows], batch_tokens):
        states, final = teacher.hidden_states([rows[index].tokens for index in batch], identity.aux_layers)
        for at, index in enumerate(batch):
            row = rows[index]
            length = len(row.tokens)
            normed = [teacher.normalised(state[at, :length]) for state in states]
            aux[index] = torch.cat(normed, -1).to("cpu", torch.bfloat16)
            logits = functional.linear(final[at, len(row.prompt) - 1 : length - 1], head)
            values, tokens = logits.topk(identity.teacher_top, -1)
            top[index] = (tokens.to("cpu", torch.int16), values.to("cpu", torch.bfloat16))
    indices = range(len(rows))
    return {
        "index": torch.tensor([[len(r.tokens), len(r.prompt), r.temperature] for r in rows], dtype=torch.float64),
        "tokens": torch.tensor([token for row in rows for token in row.tokens], dtype=torch.int32),
        "aux": torch.cat([aux[index] for index in indices]),
        "top_tokens": torch.cat([top[index][0] for index in indices]),
        "top_logits": torch.cat([top[index][1] for index in indices]),
    }
