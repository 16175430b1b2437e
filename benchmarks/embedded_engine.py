"""vLLM with the embedded pair in this process, for the benchmarks that look into the engine, held to texts if asked.

Called by confidence_engine.py, drafter_acceptance.py, overlap_engine.py, pruning_gate.py and sliced_arms.py. What
imports numba waits until the engine stands: vLLM 0.32 looks through all modules for its Triton kernels while it starts
(triton_utils/dispatcher.py) and stumbles over llvmlite's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from faser.controller.held_answers import engine as held_answers
from faser.models.embedded.pair import EmbeddedPair, ensure_embedded_drafter, ensure_embedded_target
from faser.models.embedded.precision import dtype_on

FASER: Final = {
    "scheduler_cls": "faser.engine_adapter.scheduler.FaserScheduler",
    "worker_cls": "faser.engine_adapter.worker.FaserWorker",
}


def start_engine(
    length: int,
    requests: int,
    target: Path | None = None,
    drafter: Path | None = None,
    classes: Mapping[str, str] = FASER,
    **options: Any,
) -> Any:
    """Return vLLM, eager, that drafts at most `length` tokens for at most so many requests at a time."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    pair = EmbeddedPair(target or ensure_embedded_target(), drafter or ensure_embedded_drafter())
    settings: dict[str, Any] = {"dtype": dtype_on("cpu"), "enforce_eager": True, "max_num_seqs": requests, "seed": 0}
    drafting = pair.speculative(length)
    return LLM(str(pair.target), speculative_config=drafting, **(settings | dict(classes) | options))


def chat(engine: Any, texts: Sequence[str], **sampling: Any) -> None:
    """Answer all prompts at once."""
    from vllm import SamplingParams

    chats = [[{"role": "user", "content": text}] for text in texts]
    engine.chat(chats, SamplingParams(**sampling), use_tqdm=False)


def add_requests(engine: Any, names: Sequence[str], prompts: Sequence[Sequence[int]], tokens: int) -> None:
    """Send prompts of token ids, each to be answered greedily with so many tokens."""
    from vllm import SamplingParams

    limits = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, limits)


class HeldText(held_answers.HeldText):
    """Holds the requests named in `texts` to them; controller/held_answers/engine.py says how and why."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.texts: dict[str, list[int]] = {}

    def text_of(self, name: str) -> Sequence[int]:
        """Return the text of a request; vLLM may add a suffix to its id."""
        return self.texts.get(name.split("-")[0], ())
