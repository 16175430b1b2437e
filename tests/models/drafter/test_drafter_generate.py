"""The target writes its own corpus in vLLM: shipped training prompts first, then turns of its own; it resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faser.env.workload.held_out import is_training_prompt
from faser.models.drafter.corpus import read_corpus
from faser.models.drafter.generate import shipped_turns
from faser.models.drafter.recipe import Recipe
from faser.models.embedded.pair import ensure_embedded_target

WRITE = """
import sys
from pathlib import Path
from transformers import AutoTokenizer
from faser.models.drafter.corpus import ChatFormat
from faser.models.drafter.generate import generate_corpus, shipped_turns
from faser.models.drafter.recipe import Recipe

target, output, conversations = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
recipe = Recipe(
    generate_answers=int(sys.argv[4]), generate_conversations=conversations, generate_answer_tokens=16,
    generate_at_once=4,
)
chat = ChatFormat.of(AutoTokenizer.from_pretrained(str(target)))
generate_corpus(recipe, target, chat, output, lambda done, total: None)
"""


def write(target: Path, output: Path, conversations: int, answers: int) -> None:
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    subprocess.run(
        [sys.executable, "-c", WRITE, str(target), str(output), str(conversations), str(answers)],
        check=True, cwd="/", env={**os.environ, **quiet}, timeout=240,
    )  # fmt: skip


def test_shipped_prompts_are_of_the_training_side_in_seeded_order() -> None:
    turns = shipped_turns(Recipe(generate_answers=2))
    assert turns == shipped_turns(Recipe(generate_answers=2))
    assert turns != shipped_turns(Recipe(generate_answers=2, seed=21))
    assert len(turns) == 2 * len(set(turns)) > 500
    assert all(is_training_prompt(turn.text) for turn in turns)


@pytest.mark.engine
@pytest.mark.slow  # `make proof`
def test_the_target_writes_its_corpus_and_goes_on_after_an_interruption(tmp_path: Path) -> None:
    target, output = ensure_embedded_target(), tmp_path / "corpus.jsonl"
    write(target, output, 3, 0)
    whole = output.read_bytes()
    output.write_bytes(whole + b'{"p": [1, 2')  # killed while writing
    write(target, output, 5, 1)
    assert output.read_bytes().startswith(whole)
    tokenizer: Any = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(target))
    rows = read_corpus(output, tokenizer, 49152)
    assert [row.source == "self" for row in rows] == [True, True, True, False, False]
    assert all(8 <= len(row.answer) <= 16 for row in rows)
