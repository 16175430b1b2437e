"""The recipe of one drafter: every setting of `faser drafter train`, read from a TOML file.

The trainer, the feature cache and the exporter take it; it travels inside the checkpoint and the card. It must never
be changed while a run is under way: a checkpoint of another recipe is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from .drafter_error import DrafterError


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """All settings of a run; each key may stand in the TOML file, unknown keys are refused."""

    target: str = ""  # folder of the target model (Hugging Face layout); empty: the embedded one
    corpus: str = ""  # conversations of the target, .jsonl or .jsonl.gz (p, g, T, source); empty: generated with vLLM
    generate_answers: int = 2  # answers to each shipped prompt of the training side, when no corpus is given
    generate_conversations: int = 8000  # conversations in all; turns written by the target itself fill up
    generate_answer_tokens: int = 384  # longest answer
    generate_at_once: int = 192  # requests in vLLM at a time
    work: str = "drafter-run"  # folder of the feature cache, the checkpoints and the log
    initial: str = ""  # own weights to start from (.safetensors); empty: ridge regression on cached features
    device: str = "cpu"  # "cpu" or "cuda"
    threads: int = 1  # CPU threads of matrix products
    seed: int = 20  # of shuffling, of the start weights and of generated text
    draft_vocabulary: int = 8192  # tokens the head can propose: the most frequent ones of the training side
    aux_layers: tuple[int, ...] = ()  # outputs of these target layers feed the head; empty: n/10, n/2+1, n
    intermediate_size: int = 0  # width of the head's MLP; 0: as the target's
    teacher_top: int = 64  # teacher logits kept per position
    teacher_temperature: float = 1.0  # of the teacher's distribution in the loss
    cache_batch_tokens: int = 3400  # padded tokens of one teacher batch
    longest_answer: int = 0  # train on so many first tokens of an answer; 0: all. Late ones repeat and teach little
    cache_tokens: int = 0  # stop caching after so many tokens; 0: all conversations
    minimum_response_tokens: int = 50_000  # fewer on the training side are refused
    evaluation_conversations: int = 80  # held-out conversations for the figures during training
    evaluation_depth: int = 4  # draft positions that are scored
    tokens: int = 5_000_000  # response tokens to train on, repeats counted: the length of the schedule
    batch_tokens: int = 2600  # padded tokens of one optimiser step
    depths: tuple[int, ...] = (1, 3)  # training-time-test depth of each part of the schedule
    depth_shares: tuple[float, ...] = (0.45, 0.55)  # share of the tokens of each part
    depth_decay: float = 0.8  # weight of the loss of each further depth
    matrix_rate: float = 0.02  # peak learning rate of matrices (Muon)
    vector_rate: float = 2e-3  # peak learning rate of norms (AdamW)
    momentum: float = 0.95  # of Muon
    newton_schulz_steps: int = 5  # of Muon
    weight_decay: float = 0.01  # of matrices
    clip: float = 1.0  # gradient norm
    warmup_steps: int = 30
    flat_share: float = 0.25  # share of the tokens at the peak rate, then linear to final_rate
    final_rate: float = 0.02  # of the peak
    report_s: float = 300.0  # seconds between evaluations during training
    checkpoint_s: float = 120.0  # seconds between checkpoints

    def __post_init__(self) -> None:
        if len(self.depths) != len(self.depth_shares) or abs(sum(self.depth_shares) - 1) > 1e-6:
            raise DrafterError(
                f"depths {self.depths} and depth_shares {self.depth_shares}: expected one share per depth, sum 1"
            )
        if not 0 < self.draft_vocabulary < 2**15 or self.teacher_top > self.draft_vocabulary:
            raise DrafterError(
                f"draft_vocabulary {self.draft_vocabulary}, teacher_top {self.teacher_top}: expected a vocabulary of "
                f"1 to {2**15 - 1} tokens and no larger teacher_top"
            )
        if self.device not in ("cpu", "cuda"):
            raise DrafterError(f"device {self.device!r}: expected cpu or cuda")

    def depth_at(self, progress: float) -> int:
        """Give the training-time-test depth at a share of the schedule."""
        end = 0.0
        for depth, share in zip(self.depths, self.depth_shares, strict=True):
            end += share
            if progress < end:
                return depth
        return self.depths[-1]

    def rate_at(self, step: int, progress: float) -> float:
        """Give the learning rate as a share of its peak: warm-up by steps, flat, then linear by tokens."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if progress < self.flat_share:
            return warm
        return warm * max(self.final_rate, (1 - progress) / (1 - self.flat_share))

    def learning_digest(self) -> str:
        """Identify what decides the result, leaving out where files lie and how often is reported."""
        kept = {key: value for key, value in dataclasses.asdict(self).items() if key not in _LOOSE}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


_LOOSE = {"target", "corpus", "work", "initial", "device", "threads", "tokens", "report_s", "checkpoint_s"} | {
    field.name for field in dataclasses.fields(Recipe) if field.name.startswith(("generate_", "cache_"))
}  # what may differ when a run goes on; data and start weights are checked by the cache and the checkpoint itself


def read_recipe(path: Path, overrides: Mapping[str, object] | None = None) -> Recipe:
    """Read a recipe from TOML; `overrides` (from flags) win over the file."""
    try:
        values: dict[str, object] = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DrafterError(f"recipe {path}: {error}; expected a readable TOML file") from error
    return make_recipe(values | dict(overrides or {}), str(path))


def make_recipe(values: Mapping[str, object], origin: str) -> Recipe:
    """Check names and types of settings and build the recipe."""
    fields = {field.name: field.default for field in dataclasses.fields(Recipe)}
    checked: dict[str, object] = {}
    for key, value in values.items():
        if key not in fields:
            raise DrafterError(f"{origin}: unknown setting {key!r}; known: {', '.join(sorted(fields))}")
        checked[key] = _as_type_of(fields[key], value, f"{origin}: {key}")
    return Recipe(**checked)  # type: ignore[arg-type]


def _as_type_of(default: object, value: object, name: str) -> object:
    if isinstance(default, tuple) and isinstance(value, list | tuple):
        return tuple(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(default):
        raise DrafterError(f"{name} = {value!r}: expected {type(default).__name__}")
    return value
