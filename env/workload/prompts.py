"""The prompts that come with the package: five kinds, each with source and licence (prompts/LICENSES.md).

Called by env/workload/workload.py, by tests and by training. Demo, tests and benchmarks take `held_out_prompts`,
training takes `training_prompts`; nothing else hands prompts out.
"""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Iterable, Sequence
from importlib.resources.abc import Traversable
from typing import Final

import msgspec

from ...engine_adapter.errors import UsageError
from .held_out import is_training_prompt

KINDS: Final = ("chat", "code", "maths", "summarisation", "tools")


class PromptError(UsageError):
    """Prompts cannot be used; the message names file and line."""


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One user turn. `tokens` is its length in tokens of the embedded target's tokenizer, without the template."""

    id: str
    source: str
    kind: str
    task: str
    tokens: int
    text: str


def held_out_prompts(kinds: Iterable[str] = KINDS) -> list[Prompt]:
    """Return the prompts no model was trained on, kind by kind in file order."""
    return [prompt for kind in kinds for prompt in _shipped(kind) if not is_training_prompt(prompt.text)]


def training_prompts(kinds: Iterable[str] = KINDS) -> list[Prompt]:
    """Return the prompts training may see, kind by kind in file order."""
    return [prompt for kind in kinds for prompt in _shipped(kind) if is_training_prompt(prompt.text)]


@functools.cache
def _shipped(kind: str) -> Sequence[Prompt]:
    if kind not in KINDS:
        raise PromptError(f"no prompts of kind {kind!r}; expected one of {', '.join(KINDS)}")
    return tuple(read_prompts(importlib.resources.files(__package__) / "prompts" / f"{kind}.jsonl"))


def read_prompts(file: Traversable) -> list[Prompt]:
    """Read a JSON-lines file of prompts; raise PromptError that names file and line."""
    decoder = msgspec.json.Decoder(Prompt)
    prompts: list[Prompt] = []
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise PromptError(f"{file.name}: cannot be read ({error})") from None
    for number, line in enumerate(lines, start=1):
        try:
            prompts.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise PromptError(f"{file.name}, line {number}: {error}; expected {_EXPECTED}") from None
    return prompts


_EXPECTED: Final = f"an object with {', '.join(Prompt.__struct_fields__)}"
