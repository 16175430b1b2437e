"""What it costs vLLM's V1 runner to drop half of its batch and take the other half in every step.

    python benchmarks/overlap_evict.py [--requests 8 32 128] [--json FILE]

Two groups that take turns are evicted from the persistent batch and added to it again. Two arms of the same engine,
whose steps have equally many rows: n / 2 requests in every step, and n of which half are left out in turns. Times
vLLM's book-keeping alone (`_update_states`) and `schedule`. No drafter; prints medians of the steps' CPU time as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from remote import Remote, serve

from faser.controller.bench_machine import provenance
from faser.models.embedded import ensure_embedded_target

TOKENS = 48  # per request
PROMPT_TOKENS = 64
WARM_STEPS = 8


class Engine:
    """In the child: answers `run`."""

    def __init__(self, requests: int) -> None:
        from vllm import LLM

        llm = LLM(
            str(ensure_embedded_target()), dtype="float32", enforce_eager=True, max_model_len=512,
            max_num_seqs=requests, enable_prefix_caching=False,
        )  # fmt: skip
        self._engine: Any = llm.llm_engine
        core: Any = self._engine.engine_core
        self._scheduler = core.engine_core.scheduler
        runner: Any = self._engine.model_executor.driver_worker.worker.model_runner
        self._spent: dict[str, list[float]] = {}
        runner._update_states = self._timed("update", runner._update_states)
        self._scheduler.schedule = self._timed("schedule", self._scheduler.schedule)
        self._next = 0

    def _timed(self, name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            found = whole(*args, **kwargs)
            self._spent.setdefault(name, []).append(time.thread_time() - began_s)
            return found

        return run

    def run(self, requests: int, is_in_turns: bool) -> dict[str, float]:
        """Return milliseconds per step once every prompt is read."""
        from vllm import SamplingParams

        limits = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        for _ in range(requests):
            self._next += 1
            prompt: Any = {"prompt_token_ids": [1000 + self._next] * PROMPT_TOKENS}
            self._engine.add_request(str(self._next), prompt, limits)
        steps = 0
        while self._engine.has_unfinished_requests():
            running = self._scheduler.running
            is_steady = len(running) == requests and all(request.num_output_tokens for request in running)
            if not is_steady and not steps:
                self._spent = {}
            elif not is_steady:
                break
            steps += is_steady
            if is_in_turns and is_steady:
                for request in running[steps % 2 :: 2]:
                    request.next_decode_eligible_step = self._scheduler.current_step + 2
            self._engine.step()
        spent = {name: 1e3 * statistics.median(found[WARM_STEPS:steps]) for name, found in self._spent.items()}
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return spent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32, 128], help="even numbers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the report here as well")
    options = parser.parse_args()
    arms = {"half in every step": False, "halves in turns": True}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        engine = Remote(str(Path(__file__)), [str(max(options.requests))], folder)
        try:
            engine.wait_ready()
            for requests in options.requests:
                runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
                for _ in range(options.rounds):
                    for arm, is_in_turns in arms.items():
                        asked = requests if is_in_turns else requests // 2
                        runs[arm].append(engine.ask("run", asked, is_in_turns))
                found[str(requests)] = {
                    arm: {f"{name}_ms": statistics.median(run[name] for run in each) for name in each[0]}
                    for arm, each in runs.items()
                }
        finally:
            engine.end()
    text = json.dumps(provenance() | {"by_requests": found}, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    if "--child" in sys.argv:
        serve(Engine(int(sys.argv[2])))
    else:
        main()
