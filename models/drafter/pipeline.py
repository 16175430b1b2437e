"""From a recipe to a drafter: check everything, prepare the data, train, export. One call per CLI command.

Called by controller/cli/drafter.py, which shows the progress. All refusals come before the first teacher batch.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..embedded.pair import ensure_embedded_target
from .corpus import (
    ChatFormat,
    Conversation,
    choose_draft_vocabulary,
    choose_for_evaluation,
    choose_for_training,
    corpus_digest,
    coverage,
    read_corpus,
    response_tokens,
)
from .drafter_error import DrafterError
from .evaluate import Acceptance, evaluate
from .export import export_drafter
from .features import (
    CacheIdentity,
    FeatureCache,
    build_cache,
    bytes_per_token,
    check_corpus_is_targets,
    check_space,
    missing_tokens,
)
from .generate import generate_corpus
from .initial_weights import read_own_weights, ridge_start
from .network import DraftHead, HeadShape
from .recipe import Recipe
from .teacher import Teacher, weights_digest
from .train import Trainer, TrainingReport

Tensor = torch.Tensor
Stage = Callable[[str, int, int], None]  # what is done, done so far, in all
CHECKPOINT = "checkpoint.pt"
CORPUS = "corpus.jsonl"  # in the work folder, where none is given
DEFAULT_TARGET = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Workshop:
    """Everything a run needs, checked."""

    recipe: Recipe
    target: Path
    shape: HeadShape
    aux_layers: tuple[int, ...]
    vocabulary: Tensor  # (draft vocabulary,) int64
    embedding: Tensor  # (vocabulary, hidden), of the type to compute in
    lm_head: Tensor  # (draft vocabulary, hidden)
    last_layer: Mapping[str, Tensor]
    train: FeatureCache
    held_out: FeatureCache
    data: Mapping[str, object]  # facts for the card

    @property
    def checkpoint(self) -> Path:
        return Path(self.recipe.work) / CHECKPOINT

    def fresh_head(self) -> DraftHead:
        """Give a head with the recipe's start weights."""
        if self.recipe.initial:
            weights = read_own_weights(Path(self.recipe.initial), self.shape)
        else:
            weights = ridge_start(self.shape, self.train, self.embedding, self.last_layer, self.recipe.seed)
        return DraftHead(self.shape, weights, self.embedding)

    def trainer(self) -> Trainer:
        """Give a trainer, resumed where a checkpoint lies in the work folder."""
        trainer = Trainer(self.recipe, self.fresh_head(), self.lm_head, self.vocabulary, self.train, self.held_out)
        if self.checkpoint.exists():
            trainer.resume(self.checkpoint)
        return trainer


def open_workshop(recipe: Recipe, stage: Stage) -> Workshop:
    """Check target, head, corpus and disk, then compute the features that are missing."""
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise DrafterError("device cuda: torch sees no GPU; use cpu")
    target = target_folder(recipe, stage)
    teacher = Teacher(target, recipe.device)
    aux_layers = recipe.aux_layers or teacher.shape.default_aux_layers()
    if not all(1 <= layer <= teacher.shape.layers for layer in aux_layers):
        raise DrafterError(f"aux_layers {aux_layers}: the target has layers 1 to {teacher.shape.layers}")
    shape = HeadShape.of(teacher.shape, len(aux_layers), recipe.intermediate_size)
    if recipe.initial:
        read_own_weights(Path(recipe.initial), shape)
    row_bytes = bytes_per_token(shape.hidden_size, len(aux_layers), recipe.teacher_top)
    work = Path(recipe.work)
    if not recipe.corpus and not (work / CORPUS).exists():  # generating takes an hour: a full disk is seen before
        expected = recipe.generate_conversations * recipe.generate_answer_tokens
        check_space(work, row_bytes, min(recipe.cache_tokens or expected, expected))
    rows, corpus = _conversations(recipe, teacher, target, stage)
    chosen = choose_for_training(rows, recipe.seed, recipe.longest_answer, recipe.cache_tokens)
    held_out = choose_for_evaluation(rows, recipe.seed, recipe.evaluation_conversations)
    _check_amount(recipe, corpus, chosen, held_out)
    agreement = check_corpus_is_targets(teacher, rows)
    caches = {"held-out": held_out, "train": chosen}
    missing = sum(missing_tokens(work / f"features-{name}", found) for name, found in caches.items())
    check_space(work, row_bytes, missing)
    vocabulary = choose_draft_vocabulary(rows, recipe.draft_vocabulary, teacher.shape.vocabulary_size)
    weights = weights_digest(target)

    def cache(name: str) -> FeatureCache:
        conversations = caches[name]
        identity = CacheIdentity(
            target=weights,
            corpus=corpus_digest(conversations),
            aux_layers=aux_layers,
            teacher_top=recipe.teacher_top,
            draft_vocabulary=tuple(vocabulary),
        )

        def progress(done: int, total: int) -> None:
            stage(f"features {name}", done, total)

        return build_cache(
            work / f"features-{name}", identity, teacher, conversations, recipe.cache_batch_tokens, progress
        )

    ids = torch.tensor(vocabulary, device=teacher.device)
    return Workshop(
        recipe=recipe,
        target=target,
        shape=shape,
        aux_layers=aux_layers,
        vocabulary=ids,
        embedding=teacher.embedding,
        lm_head=teacher.head[ids].contiguous(),
        last_layer=teacher.last_layer(),
        held_out=cache("held-out"),
        train=cache("train"),
        data={
            "target_sha256": weights,
            "training_conversations": len(chosen),
            "training_answer_tokens": response_tokens(chosen),
            "draft_vocabulary_coverage_held_out": round(coverage(held_out, vocabulary), 4),
            "corpus_greedy_agreement": round(agreement, 4),
        },
    )


def target_folder(recipe: Recipe, stage: Stage) -> Path:
    """Give the recipe's target; the embedded one when it names none."""
    if recipe.target:
        return Path(recipe.target).expanduser()
    return ensure_embedded_target(lambda what, share: stage(what, int(100 * share), 100))


def train_drafter(workshop: Workshop, trainer: Trainer, report: Callable[[TrainingReport], None], command: str) -> Path:
    """Train to the end of the schedule and export; give the folder that vLLM loads."""
    if not trainer.position.answer_tokens:
        _check_checkpoint_space(workshop)
    trainer.run(workshop.checkpoint, report)
    return export_trained(workshop, trainer, command)


def export_trained(workshop: Workshop, trainer: Trainer, command: str) -> Path:
    """Write the head with its card and the offline figures into `work`/drafter."""
    position = trainer.position
    card = {
        "name": f"EAGLE-3 head for {target_name(workshop.recipe)}",
        "kind": "drafter",
        "method": "eagle3",
        "target": target_name(workshop.recipe),
        "license": "that of the target and of the corpus",
        "command": command,
        "recipe": dataclasses.asdict(workshop.recipe),
        "seed": workshop.recipe.seed,
        "answer_tokens_seen": position.answer_tokens,
        "steps": position.step,
        "training_cpu_s": round(position.cpu_s),
        "data": dict(workshop.data),
        "offline_held_out": [acceptance_fields(figure) for figure in trainer.score()],
    }
    return export_drafter(
        Path(workshop.recipe.work) / "drafter",
        workshop.target,
        trainer.head.weights(),
        workshop.vocabulary,
        card,
        workshop.aux_layers,
    )


def evaluate_drafter(workshop: Workshop, weights: Path) -> list[Acceptance]:
    """Score an exported head on the held-out conversations, without vLLM."""
    head = DraftHead(workshop.shape, read_own_weights(weights, workshop.shape), workshop.embedding)
    recipe = workshop.recipe
    return evaluate(
        head, workshop.lm_head, workshop.vocabulary, workshop.held_out, recipe.evaluation_depth, recipe.batch_tokens
    )


def acceptance_fields(figure: Acceptance) -> dict[str, object]:
    """Lay out one score for JSON."""
    return {
        "temperature": figure.temperature,
        "drafts": figure.drafts,
        "acceptance_by_position": [round(rate, 4) for rate in figure.rates],
        "mean_length": round(figure.mean_length, 4),
        "confidence_by_position": [
            {
                "tested": one.tested,
                "rejected": one.rejected,
                "auc": round(one.auc, 4) if one.tested > one.rejected > 0 else None,
                "calibration_error": round(one.calibration_error, 4),
            }
            for one in figure.confidence
        ],
    }


def target_name(recipe: Recipe) -> str:
    return Path(recipe.target).name if recipe.target else DEFAULT_TARGET


def _conversations(recipe: Recipe, teacher: Teacher, target: Path, stage: Stage) -> tuple[list[Conversation], Path]:
    tokenizer = teacher.tokenizer()
    path = Path(recipe.corpus).expanduser() if recipe.corpus else Path(recipe.work) / CORPUS
    if not recipe.corpus:
        chat = ChatFormat.of(tokenizer)
        generate_corpus(recipe, target, chat, path, lambda done, total: stage("writing text", done, total))
    return read_corpus(path, tokenizer, teacher.shape.vocabulary_size), path


def _check_amount(
    recipe: Recipe, corpus: Path, chosen: Sequence[Conversation], held_out: Sequence[Conversation]
) -> None:
    found = response_tokens(chosen)
    if found < recipe.minimum_response_tokens or not held_out:
        raise DrafterError(
            f"corpus {corpus}: {found} answer tokens on the training side and {len(held_out)} held-out conversations; "
            f"expected {recipe.minimum_response_tokens} or more and at least one; generate more text"
        )


def _check_checkpoint_space(workshop: Workshop) -> None:
    needed = 16 * sum(torch.Size(size).numel() for size in workshop.shape.parameters().values())
    free = shutil.disk_usage(workshop.recipe.work).free
    if needed > free:
        raise DrafterError(
            f"work folder {workshop.recipe.work}: checkpoint and export need {needed / 1e6:.0f} MB, "
            f"{free / 1e6:.0f} MB are free"
        )
