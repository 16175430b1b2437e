"""Structured output on vLLM's real V2 runner: tokens are the target's under its grammars, whatever FASER does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345678"
TOKENS = ["<unk>", "<s>", "</s>", *LETTERS]  # 64
KINDS: list[Any] = [
    {"structured_outputs": {"regex": "[a-zA-Z]{20,24}"}, "ignore_eos": False},  # most of what is drafted is allowed
    {"structured_outputs": {"regex": "([0-4][a-m]){2,9}z"}, "ignore_eos": False},
    {},
]
RULE = {"random": 4, "seed": 1}
CUTS: dict[str, Any] = {"layers": [1], "thresholds": [0.5]}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Write a tokenizer of one letter a token."""
    folder: Path = tmp_path_factory.mktemp("letters")
    vocabulary = {token: place for place, token in enumerate(TOKENS)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    made = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": split, "post_processor": None, "decoder": {"type": "Fuse"}, "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(made))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return {
        "engine": {"tokenizer": str(folder), "skip_tokenizer_init": False},
        "prompts": [5, 17, 9], "samplings": KINDS, "sampling": {"max_tokens": 14},
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(forks: Any, tiny: Any, asked: dict[str, Any]) -> Any:
    return forks("generate", **tiny.without("eagle3"), **asked)


def texts(run: Any) -> list[str]:
    return ["".join(TOKENS[token] for token in said).removesuffix("</s>") for (said,) in run["tokens"]]


def test_the_target_alone_keeps_to_its_grammars(forks: Any, tiny: Any, asked: dict[str, Any], alone: Any) -> None:
    free = forks("generate", **tiny.without("eagle3"), **asked | {"samplings": [{}]})
    letters, pairs, plain = texts(alone)
    assert letters.isalpha()
    assert all(each in ("01234", LETTERS[:13])[place % 2] for place, each in enumerate(pairs.rstrip("z")))
    assert [plain] == texts(free)[2:]
    assert texts(free)[:2] != [letters, pairs]  # the grammars had something to say


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["async", "sync"])
def test_lengths_and_cuts_leave_what_grammars_allow(
    forks: Any, tiny: Any, asked: dict[str, Any], alone: Any, is_async: bool
) -> None:
    run = forks("prunings:pruned", **tiny.scenario("eagle3"), **asked, is_async=is_async, rule=RULE, exits=CUTS)
    assert run["tokens"] == alone["tokens"]
    assert (run["is_pruning"], run["faults"], run["miscounted"]) == (True, {}, 0)
    assert sum(row[1] for step in run["pruned"] for row in step["rows"] if step["saved"]) > 5


HALVES: dict[str, Any] = {"exits": CUTS, "graphs": {"mode": "FULL_DECODE_ONLY", "sizes": [6, 10, 15]}}


@pytest.mark.slow  # `make proof`
@pytest.mark.parametrize(
    ("job", "changes"),
    [("prunings:pruned", HALVES), ("sides:beside", {"job": "generate", "chance": 0.3})],
    ids=["halves", "groups"],
)
def test_halves_and_groups_do_too(
    forks: Any, tiny: Any, asked: dict[str, Any], alone: Any, job: str, changes: dict[str, Any]
) -> None:
    run = forks(job, **tiny.scenario("eagle3"), **asked, is_async=True, rule=RULE, **changes)
    assert run["tokens"] == alone["tokens"]
    assert run["faults"] == {}


def test_control_a_grammar_that_masks_nothing_is_noticed(
    forks: Any, tiny: Any, asked: dict[str, Any], alone: Any
) -> None:
    run = forks("generate", **tiny.scenario("eagle3"), **asked, rule=RULE, control="no masks")
    assert run["tokens"] != alone["tokens"]
