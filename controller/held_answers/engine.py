"""Holds a vLLM engine to answers recorded before: whatever it computes, the recorded token comes out.

vLLM loads HeldWorker into the servers of `faser bench --held`, and benchmarks/embedded_engine.py uses HeldText; nothing
else does. Greedy answers in bfloat16 part ways between engines that verify in batches of other shapes, and some texts
are easier to draft for than others: with few requests that luck is most of what two arms of a benchmark differ by. Held
to one text, all arms draft for the same tokens. One logit of each row is raised before vLLM's sampler looks (0.32, V1
runner, synchronous scheduling), so far that it is sampled at any temperature; everything else is done as always, and
costs what it costs.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

CERTAIN: Final = 1e4  # above any logit
REMEMBERED: Final = 1024  # requests


def held_rows(
    texts: Sequence[Sequence[int]], emitted: Sequence[int], drafts: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return which rows of a step's logits are held, and the token of each.

    :param texts: of each request in the batch
    :param emitted: tokens of each request so far
    :param drafts: draft tokens of each that are verified; a request has a row more than that, one after the other
    """
    rows: list[int] = []
    tokens: list[int] = []
    first = 0
    for text, begin, count in zip(texts, emitted, drafts, strict=True):
        held = text[begin : begin + count + 1]
        rows += range(first, first + len(held))
        tokens += held
        first += count + 1
    return rows, tokens


class HeldText(ABC):
    """Holds the requests for which `text_of` has a text, and raises RuntimeError if one leaves it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._is_inside = False  # the rejection sampler calls the plain one for its last rows
        self._checked: dict[str, int] = {}  # tokens of each request in the last batch that are known to be the text's
        runner.sampler.register_forward_pre_hook(self._before_sampling, with_kwargs=True)
        if hasattr(runner, "rejection_sampler"):
            runner.rejection_sampler.register_forward_pre_hook(self._before_rejecting)
            runner.rejection_sampler.register_forward_hook(self._after_rejecting)

    @abstractmethod
    def text_of(self, name: str) -> Sequence[int]:
        """Return the tokens that a request is held to, none where it is free."""

    def _before_sampling(self, module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not self._is_inside:
            logits = named["logits"] if "logits" in named else args[0]
            self._hold(logits, [0] * len(logits))

    def _before_rejecting(self, module: Any, args: tuple[Any, ...]) -> None:
        self._is_inside = True
        verified, _, logits, _ = args
        self._hold(logits, verified.num_draft_tokens)

    def _after_rejecting(self, *_: Any) -> None:
        self._is_inside = False

    def _hold(self, logits: Any, drafts: Sequence[int]) -> None:
        names = self._runner.input_batch.req_ids
        texts = [self.text_of(name) for name in names]
        if any(texts):
            said = [self._runner.requests[name].output_token_ids for name in names]
            self._check(names, texts, said)
            rows, tokens = held_rows(texts, [len(each) for each in said], drafts)
            logits[rows, tokens] = CERTAIN

    def _check(self, names: Sequence[str], texts: Sequence[Sequence[int]], said: Sequence[Sequence[int]]) -> None:
        for name, text, tokens in zip(names, texts, said, strict=True):
            known, end = self._checked.get(name, 0), min(len(text), len(tokens))
            if list(tokens[known:end]) != list(text[known:end]):
                raise RuntimeError(f"request {name} left the text that it is held to")
        self._checked = {name: len(tokens) for name, tokens in zip(names, said, strict=True)}


class HeldAnswers(HeldText):
    """Holds every request whose prompt is known to the answer to that prompt.

    :param answers: tokens of a prompt, its template included, to tokens of its answer
    """

    def __init__(self, runner: Any, answers: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        super().__init__(runner)
        self._answers = answers
        self._texts: dict[str, Sequence[int]] = {}  # of requests seen lately

    def text_of(self, name: str) -> Sequence[int]:
        """Return the answer to a request's prompt."""
        if name not in self._texts:
            if len(self._texts) >= REMEMBERED:
                self._texts.clear()
            prompt = tuple(self._runner.requests[name].prompt_token_ids or ())
            self._texts[name] = self._answers.get(prompt, ())
        return self._texts[name]


class HeldWorker:
    """What vLLM adds to its worker class where a server is started with --worker-extension-cls."""

    model_runner: Any
    vllm_config: Any

    def mend_sampling(self) -> bool:
        """Give speculating requests their temperature, which vLLM 0.32 loses on a CPU; return whether it did."""
        from ...engine_adapter.patches.v1 import mend_expand

        return mend_expand()

    def hold_answers(self, path: str) -> None:
        """Hold this engine from now on to the answers of a file; raise RuntimeError where it could not be."""
        if self.vllm_config.scheduler_config.async_scheduling:
            raise RuntimeError("answers cannot be held under asynchronous scheduling")
        answers = {tuple(prompt): answer for prompt, answer in json.loads(Path(path).read_text())}
        HeldAnswers(self.model_runner, answers)  # the sampler's hooks keep it
