"""The engine of overlap.py in a process of its own: requests drafted in turn, ahead or in two groups by the oracle.

All arms run in this one engine and with this one drafter process, each on its own core: in turn only means that the
drafter is not asked before the target has verified. Every step leaves the times of its phases on both cores.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remote import serve

from faser.engine_adapter import engine_facts, ping_pong, runner_frontier
from faser.engine_adapter.drafter_process import DrafterProcess, Wish
from faser.models.embedded import ensure_embedded_target

ORACLE = Path(__file__).with_name("overlap_oracle.py")
START_LIMIT_S = 60.0
MAX_MODEL_LEN = 512


class Engine:
    """In the child: answers `record`, `equip`, `run` and `run_all`."""

    def __init__(self, length: int, requests: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="faser-overlap-")
        self._file = Path(self._folder.name) / "oracle.json"
        self._command = [sys.executable, str(ORACLE), str(self._file)]
        self._write([], 0.0, 0.0)
        self._engine, self._runner, self._scheduler = self._open(length, requests)
        self._steering, self._groups = self._scheduler.steering, self._scheduler.ping_pong
        self._scheduler.ping_pong = None
        self._remote = self._runner.remote
        if self._remote is None:
            raise RuntimeError("the drafter's process is missing; the engine's log says why")
        self._go_on = self._remote.go_on
        self._length = length
        self._requests = 0
        self._steps: list[dict[str, Any]] = []
        self._watch()

    def _open(self, length: int, requests: int) -> tuple[Any, Any, Any]:
        def chosen(cores: str, config: Any) -> tuple[list[str], None]:
            return self._command, None

        engine_facts.chosen_drafter = runner_frontier.chosen_drafter = ping_pong.chosen_drafter = chosen
        from vllm import LLM

        classes: dict[str, Any] = {
            "scheduler_cls": "faser.engine_adapter.scheduler.FaserScheduler",
            "worker_cls": "faser.engine_adapter.worker.FaserWorker",
            # vLLM's own drafter is never asked: it is the cheapest to have.
            "speculative_config": {
                "method": "ngram", "num_speculative_tokens": length, "prompt_lookup_max": 3, "prompt_lookup_min": 3,
            },
        }  # fmt: skip
        llm = LLM(
            str(ensure_embedded_target()), dtype="float32", enforce_eager=True, max_model_len=MAX_MODEL_LEN,
            max_num_seqs=requests, **classes,
        )  # fmt: skip
        core: Any = llm.llm_engine.engine_core
        executor: Any = llm.llm_engine.model_executor
        self._llm = llm
        return llm.llm_engine, executor.driver_worker.worker.model_runner, core.engine_core.scheduler

    def _write(self, texts: list[list[int]], wrong: float, pass_s: float) -> None:
        self._file.write_text(json.dumps({"texts": texts, "wrong": wrong, "pass_s": pass_s}))

    def _watch(self) -> None:
        """Note when each phase of a step began and ended, on the clock that both processes share."""
        runner = self._runner
        execute, verify, sample = runner.execute_model, runner.around_verify, runner.around_sample
        propose = runner.propose_draft_token_ids

        def timed(name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                began_s = time.monotonic()
                found = whole(*args, **kwargs)
                self._steps[-1][name] = [began_s, time.monotonic()]
                return found

            return run

        def begin(*args: Any, **kwargs: Any) -> Any:
            self._steps.append({"began_s": time.monotonic(), "jobs": []})
            return execute(*args, **kwargs)

        runner.execute_model = begin
        runner.around_verify, runner.around_sample = timed("verify", verify), timed("sample", sample)
        runner.propose_draft_token_ids = timed("draft", propose)

    def tokenize(self, text: str) -> list[int]:
        """Return the target's tokens of a text."""
        tokens: list[int] = self._llm.get_tokenizer().encode(text)
        return tokens

    def record(self, prompt: list[int], tokens: int) -> list[int]:
        """Return what the target says without speculation."""
        self._steering.default.length = self._steering.default.frontier = 0
        return self._generate([prompt], tokens)[0]

    def equip(self, texts: list[list[int]], wrong: float, pass_s: float) -> None:
        """Start the drafter's process again, with these texts and this much work per token."""
        old = self._remote.process
        self._write(texts, wrong, pass_s)
        old.close()
        process = DrafterProcess(self._command, old._cores)
        ends_s = time.monotonic() + START_LIMIT_S
        while not process.is_ready and time.monotonic() < ends_s:
            process.collect(1.0)
        self._remote.process = process
        self._watch_process(process)

    def _watch_process(self, process: DrafterProcess) -> None:
        collect = process.collect

        def collected(limit_s: float) -> Any:
            reply = collect(limit_s)
            if reply is not None and self._steps:
                self._steps[-1]["jobs"].append([reply.began_s, reply.ended_s])
            return reply

        process.collect = collected  # type: ignore[method-assign]

    def run(self, prompt: list[int], tokens: int, is_ahead: bool) -> dict[str, Any]:
        """Return what was said, and every step's phases."""

        def not_ahead(wishes: list[Wish], requests: int) -> None:
            """Draft in turn."""

        self._steering.default.length = self._steering.default.frontier = self._length
        self._remote.go_on = self._go_on if is_ahead else not_ahead
        before = self._remote.frontiers.outcomes
        counts = before.hits, before.misses
        said = self._generate([prompt], tokens)[0]
        return {
            "tokens": said,
            "steps": self._steps,
            "hits": before.hits - counts[0],
            "misses": before.misses - counts[1],
        }

    def run_all(self, prompts: list[list[int]], tokens: int, is_ping_pong: bool) -> dict[str, Any]:
        """Return what was said to all prompts at once, and every step's phases; nothing is drafted ahead."""
        self._steering.default.length, self._steering.default.frontier = self._length, 0
        self._scheduler.ping_pong = self._groups if is_ping_pong else None
        said = self._generate(prompts, tokens)
        self._scheduler.ping_pong = None
        return {"tokens": said, "steps": self._steps}

    def _generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        from vllm import SamplingParams

        self._steps = []
        limits = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        said: dict[str, list[int]] = {}
        for prompt in prompts:
            self._requests += 1
            said[str(self._requests)] = []
            given: Any = {"prompt_token_ids": prompt}
            self._engine.add_request(str(self._requests), given, limits)
        while self._engine.has_unfinished_requests():
            before = sum(map(len, said.values()))
            for output in self._engine.step():
                said[output.request_id] = list(output.outputs[0].token_ids)
            lengths = [len(found) for found in said.values()]
            # Neither a prompt is read nor has anybody ended.
            self._steps[-1]["is_steady"] = before >= 2 * len(prompts) and max(lengths) < tokens
            self._steps[-1]["emitted"] = sum(lengths) - before
        return list(said.values())


if __name__ == "__main__" and "--child" in sys.argv:
    serve(Engine(*map(int, sys.argv[2:4])))
