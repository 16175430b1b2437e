"""What a drafter costs that nobody asks for a draft: `python benchmarks/skip.py [--json] [--loads 1,8,32,64]`.

Two engines in processes of their own, one thread each, take turns: plain vLLM, and vLLM with the embedded drafter at
draft length 0, with FASER's skipping and without it. Prints CPU time per engine step (of the one compute thread, so
that other work on the machine counts little) and, for the first step that drafts again, the cost of catching up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

from remote import Remote, serve

from faser.models.embedded import ensure_embedded_drafter, ensure_embedded_target
from faser.models.precision import dtype_on

STEPS, WARM_UP, MISSED = 24, 4, 50


class Engine:
    """In the child: one engine without output processing to speak of."""

    def __init__(self, drafter: str) -> None:
        from vllm import LLM

        named: dict[str, Any] = {}
        if drafter:
            named = {
                "scheduler_cls": "faser.engine_adapter.scheduler.FaserScheduler",
                "worker_cls": "faser.engine_adapter.worker.FaserWorker",
                "speculative_config": {"method": "eagle3", "model": drafter, "num_speculative_tokens": 4},
            }
        llm = LLM(
            str(ensure_embedded_target()),
            dtype=dtype_on("cpu"),
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=64,
            **named,
        )
        self.engine: Any = llm.llm_engine
        core: Any = self.engine.engine_core
        self.scheduler = core.engine_core.scheduler
        self.drafter: Any = getattr(self.engine.model_executor.driver_worker.worker.model_runner, "drafter", None)
        self.catch_up = getattr(self.drafter, "catch_up", None)
        self.rounds = 0

    def fill(self, requests: int) -> None:
        """Start requests that outlast the measurement, and run their prompts."""
        from vllm import SamplingParams

        self.rounds += 1
        params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, detokenize=False)
        for index in range(requests):
            prompt = [1000 + (37 * index + 11 * place + self.rounds) % 9000 for place in range(40)]
            self.engine.add_request(f"{self.rounds}-{index}", {"prompt_token_ids": prompt}, params)
        for _ in range(WARM_UP):
            self.engine.step()

    def step_ms(self) -> float:
        """Run one step; return the CPU time of this thread."""
        started = time.thread_time()
        self.engine.step()
        return (time.thread_time() - started) * 1e3

    def clear(self, requests: int) -> None:
        """Abort them all."""
        self.engine.abort_request([f"{self.rounds}-{index}" for index in range(requests)])
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def idle(self, requests: int, is_skipping: bool) -> float:
        """Return the median step without drafts."""
        if self.drafter is not None:
            self.drafter.catch_up = self.catch_up if is_skipping else None
        self.fill(requests)
        measured = statistics.median(self.step_ms() for _ in range(STEPS))
        self.clear(requests)
        return measured

    def return_cost(self, requests: int) -> tuple[float, float, float]:
        """Return the tokens per request made up for, and the first and the usual step that drafts one token."""
        self.drafter.catch_up = self.catch_up
        self.fill(requests)
        for _ in range(MISSED - WARM_UP - 40):
            self.step_ms()
        self.scheduler.steering.default.length = 1
        first = self.step_ms()
        missed = self.drafter.caught_up / requests
        usual = statistics.median(self.step_ms() for _ in range(STEPS))
        self.scheduler.steering.default.length = 0
        self.clear(requests)
        return missed, first, usual


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", default="1,8,32,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        serve(Engine(options.child))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        apart = {"FASER_ENDPOINT": f"ipc://{folder}/nobody.sock", "FASER_CATCH_UP_TOKENS": "100000"}
        plain, drafting = (
            Remote(__file__, [drafter], folder, environment=apart) for drafter in ("", str(ensure_embedded_drafter()))
        )
        for engine in (plain, drafting):
            engine.wait_ready()
        for requests in map(int, options.loads.split(",")):
            turns = [
                (
                    plain.ask("idle", requests, False),
                    *(drafting.ask("idle", requests, skips) for skips in (True, False)),
                )
                for _ in range(options.rounds)
            ]
            returns = [drafting.ask("return_cost", requests) for _ in range(options.rounds)]
            none_ms, skipped_ms, kept_ms = map(statistics.median, zip(*turns, strict=True))
            rows.append(
                {
                    "requests": requests,
                    "none_ms": none_ms,
                    "skipped_over_none": statistics.median(turn[1] / turn[0] for turn in turns),
                    "kept_over_none": statistics.median(turn[2] / turn[0] for turn in turns),
                    "skipped_ms": skipped_ms,
                    "kept_ms": kept_ms,
                    "missed": returns[0][0],
                    "catch_up_ms": statistics.median(first - usual for _, first, usual in returns),
                }
            )
            if not options.json:
                print({name: round(value, 3) for name, value in rows[-1].items()}, flush=True)
        for remote in (plain, drafting):
            remote.end()
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
