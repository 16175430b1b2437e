"""Engine compiled or eager: `python benchmarks/compiled.py [--loads 1,8] [--rounds 5] [--json FILE]`.

Two engines with the embedded pair in processes of their own, one eager and one compiled, take turns; in each turn they
generate a fixed number of steps without speculation and with fixed draft lengths. Prints tokens/s (medians over the
turns), the paired ratio compiled over eager, and how long each engine took to start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from confidence_engine import conditions
from remote import Remote, serve

from faser.models.embedded import ensure_embedded_drafter, ensure_embedded_target
from faser.models.precision import dtype_on

LENGTHS = (0, 2)
STEPS = 16
WARM_UP = 4


class Engine:
    """In the child: one engine, asked for some steps at a time."""

    def __init__(self, mode: str) -> None:
        from transformers import AutoTokenizer
        from vllm import LLM

        from faser.env.prompt import held_out_prompts

        started = time.monotonic()
        llm = LLM(
            str(ensure_embedded_target()),
            dtype=dtype_on("cpu"),
            enforce_eager=mode == "eager",
            max_model_len=512,
            max_num_seqs=8,
            scheduler_cls="faser.engine_adapter.scheduler.FaserScheduler",
            worker_cls="faser.engine_adapter.worker.FaserWorker",
            speculative_config={
                "method": "eagle3",
                "model": str(ensure_embedded_drafter()),
                "num_speculative_tokens": max(LENGTHS),
            },
        )
        self.start_s = time.monotonic() - started
        self.engine: Any = llm.llm_engine
        core: Any = self.engine.engine_core
        self.steering = core.engine_core.scheduler.steering
        tokenizer = AutoTokenizer.from_pretrained(ensure_embedded_target())
        texts = [prompt.text for prompt in held_out_prompts(("code", "maths", "chat")) if prompt.tokens <= 120]
        self.prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
            for text in texts[:: max(1, len(texts) // 8)][:8]
        ]
        self.turns = 0

    def started(self) -> float:
        """Return the seconds the engine took to start."""
        return self.start_s

    def speed(self, requests: int, length: int) -> float:
        """Return tokens/s of some steps behind the prompts."""
        from vllm import SamplingParams

        self.turns += 1
        self.steering.default.length = length
        params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True, detokenize=False)
        names = [f"{self.turns}-{index}" for index in range(requests)]
        for name, prompt in zip(names, self.prompts, strict=False):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        said = dict.fromkeys(names, 0)

        def steps(count: int) -> None:
            for _ in range(count):
                for output in self.engine.step():
                    said[output.request_id] = len(output.outputs[0].token_ids)

        steps(WARM_UP)
        before, began = sum(said.values()), time.monotonic()
        steps(STEPS)
        rate = (sum(said.values()) - before) / (time.monotonic() - began)
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return rate


def measure(loads: list[int], rounds: int, threads: int, minutes: float) -> dict[str, Any]:
    """Return start times and, for each load and length, both medians and the paired ratio with its range."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        engines = {mode: Remote(__file__, [mode], folder, threads) for mode in ("eager", "compiled")}
        for engine in engines.values():
            engine.wait_ready()
        starts = {mode: engine.ask("started") for mode, engine in engines.items()}
        print("start, s:", {mode: round(value, 1) for mode, value in starts.items()}, flush=True)
        pairs: dict[tuple[int, int], list[tuple[float, float]]] = {(n, k): [] for n in loads for k in LENGTHS}
        ends = time.monotonic() + 60.0 * minutes
        for round_ in range(rounds + 1):
            if round_ > 1 and time.monotonic() > ends:
                break
            for (requests, length), seen in pairs.items():
                order = list(engines) if round_ % 2 else list(engines)[::-1]
                rates = {mode: engines[mode].ask("speed", requests, length) for mode in order}
                print(f"round {round_}, {requests} requests, length {length}: {rates}", flush=True)
                if round_:  # the first turn is for warming up
                    seen.append((rates["eager"], rates["compiled"]))
        for engine in engines.values():
            engine.end()
    for (requests, length), seen in pairs.items():
        ratios = sorted(compiled / eager for eager, compiled in seen)
        row = {
            "requests": requests,
            "length": length,
            "eager_tokens_per_s": statistics.median(eager for eager, _ in seen),
            "compiled_tokens_per_s": statistics.median(compiled for _, compiled in seen),
            "compiled_over_eager": statistics.median(ratios),
            "range": [ratios[0], ratios[-1]],
        }
        rows.append(row)
        print(
            f"{requests} requests, length {length}: eager {row['eager_tokens_per_s']:.1f} tokens/s, compiled "
            f"{row['compiled_tokens_per_s']:.1f}, ratio {row['compiled_over_eager']:.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )
    return {"start_s": starts, "rounds": len(seen), "threads": threads, "rows": rows}


def main() -> None:
    """Print the table and, if asked, write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no further round after these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        serve(Engine(options.child))
        return
    found = measure([int(load) for load in options.loads.split(",")], options.rounds, options.threads, options.minutes)
    if options.json is not None:
        options.json.write_text(json.dumps(conditions() | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
