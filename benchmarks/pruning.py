"""What pruned verification costs and saves: `python benchmarks/pruning.py [--batches 4,16] [--lengths 7] [--json]`.

One engine with the embedded pair, one thread; the same prompts in every mode, the modes taking turns. Prints thread CPU
time (of the one compute thread, so that other work on the machine counts little) per emitted token and per step:
none (no drafts), full (every draft verified to full depth), confidence (drafts end where the drafter doubts), pruned
(trained exit heads), both, and oracle (heads that know which tokens will be accepted: the worth of perfect prediction).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from faser.controller.launch import openmp_library
from faser.engine_adapter.decision import TokenHeads
from faser.models.embedded import ensure_embedded_drafter, ensure_embedded_target

MODES = ("none", "full", "confidence", "pruned", "both", "oracle")
ANSWER_TOKENS = 48


class Oracle(TokenHeads):
    """Exit heads that know the answer: the tokens that the unpruned run of the same prompts emitted."""

    has_candidates = False

    def __init__(self, runner: Any, layers: tuple[int, ...]) -> None:
        self.runner, self.layers = runner, layers
        self.answers: dict[tuple[int, ...], list[int]] = {}

    def passes(self, layer: int, threshold: float, checks: Any) -> Any:
        """Tell for each draft token whether it is the next one of the known answer."""
        import numpy as np

        batch, verdicts = self.runner.input_batch, []
        tokens, start = checks.tokens.tolist(), 0
        for name, count in zip(batch.req_ids, self.runner.verified.num_draft_tokens, strict=True):
            request = self.runner.requests[name]
            said = list(request.output_token_ids)
            answer = self.answers.get(tuple(request.prompt_token_ids), [])
            follows = answer[len(said) : len(said) + count] if answer[: len(said)] == said else tokens[start:]
            follows += [-1] * (count - len(follows))
            verdicts += [a == b for a, b in zip(tokens[start : start + count], follows, strict=False)]
            start += count
        return np.array(verdicts, dtype=bool)


class Bench:
    """In the child: the engine, and the modes it can be put into."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        from faser.engine_adapter.protocol import Prune, StopRule
        from faser.engine_adapter.pruning import Pruning
        from faser.engine_adapter.steering import Steering

        self.llm: Any = LLM(
            options["target"], dtype="bfloat16", enforce_eager=True, max_model_len=640, max_num_seqs=64,
            max_num_batched_tokens=4096, enable_prefix_caching=False, seed=0,
            scheduler_cls="faser.engine_adapter.scheduler.FaserScheduler",
            worker_cls="faser.engine_adapter.worker.FaserWorker",
            speculative_config={
                "method": "eagle3", "model": options["drafter"], "num_speculative_tokens": options["longest"],
            },
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.runner: Any = self.engine.model_executor.driver_worker.worker.model_runner
        self.steering: Any = self.engine.engine_core.engine_core.scheduler.steering
        self.trained, self.runner.gate = self.runner.pruning, None
        depth = int(self.runner.get_model().config.num_hidden_layers)
        self.oracle_layer = options["oracle_layer"] or depth // 2
        self.oracle = Oracle(self.runner, (self.oracle_layer,))
        self.perfect = Pruning(self.runner, self.oracle)
        self.candidates = self.runner.drafter.candidates
        self.prune: Any = None
        self.stop: Any = None
        rule = Prune(options["layer"] or depth // 2, options["threshold"])
        doubt = StopRule([1.0], [0.0], [options["confidence"]], [options["confidence"]])
        self.modes = {
            "none": (0, None, None, None),
            "full": (options["longest"], None, None, None),
            "confidence": (options["longest"], None, None, doubt),
            "pruned": (options["longest"], self.trained, rule, None),
            "both": (options["longest"], self.trained, rule, doubt),
            "oracle": (options["longest"], self.perfect, Prune(self.oracle_layer, 0.0), None),
        }
        order, record, bench = Steering.order, Steering.record, self
        self.reports: list[Any] = []

        def ordered(steering: Any, *rest: Any) -> Any:
            made = order(steering, *rest)
            made.prune, made.stop = bench.prune, bench.stop
            return made

        def recorded(steering: Any, given: Any, outcome: Any) -> None:
            if outcome.report is not None:
                bench.reports.append((outcome.report, sum(map(len, outcome.drafts.values()))))
            record(steering, given, outcome)

        Steering.order, Steering.record = ordered, recorded  # type: ignore[method-assign]
        self.count = 0

    def run(self, mode: str, prompts: list[list[int]]) -> dict[str, float]:
        """Answer the prompts in one mode; only steps without prompt rows are measured."""
        from vllm import SamplingParams

        length, pruning, self.prune, self.stop = self.modes[mode]
        self.steering.default.length = length
        self.runner.pruning = pruning
        self.runner.drafter.candidates = self.candidates if pruning is self.trained else 0
        self.count += 1
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
        for index, prompt in enumerate(prompts):
            self.engine.add_request(f"{self.count}-{index}", {"prompt_token_ids": prompt}, params)
        for _ in range(2):
            self.engine.step()
        self.reports.clear()
        steps, answers = [], {}
        first = sum(entry.request.num_output_tokens for entry in self.steering.entries.values())
        while self.engine.has_unfinished_requests():
            started = time.thread_time()
            outputs = self.engine.step()
            steps.append(time.thread_time() - started)
            for output in outputs:
                if output.finished:
                    answers[tuple(output.prompt_token_ids)] = list(output.outputs[0].token_ids)
        if mode == "full":
            self.oracle.answers = answers
        tokens = ANSWER_TOKENS * len(prompts) - first
        verified = sum(drafts for _, drafts in self.reports)
        whole = steps[: len(steps) // 2]  # later on requests have left
        return {
            "cpu_ms_per_token": 1e3 * sum(steps) / tokens,
            "step_ms": 1e3 * statistics.median(whole),
            "tokens_per_step": tokens / len(steps) / len(prompts),
            "verified": verified,
            "dropped": sum(sum(report.pruned) for report, _ in self.reports) / max(verified, 1),
            "prune_ms": 1e3 * statistics.median([report.prune_s for report, _ in self.reports[: len(whole)]] or [0.0]),
        }

    def prompts(self, count: int, offset: int) -> list[list[int]]:
        """Return held-out chat prompts as token ids."""
        from faser.env.prompt import held_out_prompts

        short = [prompt for prompt in held_out_prompts() if prompt.tokens <= 250]
        chosen = [short[(17 * index + offset) % len(short)].text for index in range(count)]
        tokenizer = self.llm.get_tokenizer()
        chats = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
            for text in chosen
        ]
        return [list(chat["input_ids"]) if not isinstance(chat, list) else chat for chat in chats]


def child(options: dict[str, Any]) -> None:
    """Measure, and write the rows to the file named in the options."""
    bench = Bench(options)
    rows = []
    for batch in options["batches"]:
        measured: dict[str, list[dict[str, float]]] = {mode: [] for mode in options["modes"]}
        for repeat in range(options["repeats"] + 1):
            prompts = bench.prompts(batch, 31 * (repeat // 2))  # a set of prompts serves two turns
            if not repeat:
                bench.run("full", prompts)  # the first turn warms up, and tells the oracle
            for mode in options["modes"]:
                found = bench.run(mode, prompts)
                if repeat:
                    measured[mode].append(found)
        for mode, runs in measured.items():
            row: dict[str, Any] = {"batch": batch, "length": options["longest"], "mode": mode}
            row |= {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
            row["runs_cpu_ms_per_token"] = [round(run["cpu_ms_per_token"], 4) for run in runs]
            rows.append(row)
    Path(options["result"]).write_text(json.dumps(rows))


def measure(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the child in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        options["result"] = f"{folder}/rows.json"
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "LD_PRELOAD": str(openmp_library() or ""), "FASER_ENDPOINT": f"ipc://{folder}/e.sock",
            "FASER_EXIT_HEADS": options["heads"],
        }  # fmt: skip
        command = [sys.executable, os.path.abspath(__file__), "--child", json.dumps(options)]
        subprocess.run(command, env=environment, check=True, cwd="/", stdout=subprocess.DEVNULL)
        rows: list[dict[str, Any]] = json.loads(Path(options["result"]).read_text())
        return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--batches", default="4,16")
    parser.add_argument("--length", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--heads", default="", help="exit heads; default: the shipped ones")
    parser.add_argument("--layer", type=int, default=0, help="of the trained heads; default: the card's")
    parser.add_argument("--threshold", type=float, default=0.0, help="of the trained heads; default: the card's")
    parser.add_argument("--oracle-layer", type=int, default=0)
    parser.add_argument("--confidence", type=float, default=0.35, help="survival below which drafts end")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return
    weights = Path(sys.modules["faser.models.embedded"].__file__ or "").parent / "weights"
    heads = Path(given.heads or weights / "exits.safetensors").absolute()
    card = json.loads(heads.with_suffix(".card.json").read_text())
    best = card["best"]
    options = {
        "target": str(ensure_embedded_target()), "drafter": str(ensure_embedded_drafter()), "heads": str(heads),
        "batches": [int(batch) for batch in given.batches.split(",")], "longest": given.length,
        "repeats": given.repeats, "modes": given.modes.split(","), "layer": given.layer or best["layer"],
        "threshold": given.threshold or best["rule"]["threshold"], "oracle_layer": given.oracle_layer,
        "confidence": given.confidence,
    }  # fmt: skip
    rows = measure(options)
    if given.json:
        print(json.dumps({"options": options, "rows": rows}, indent=1))
        return
    names = ("cpu_ms_per_token", "step_ms", "tokens_per_step", "dropped", "prune_ms")
    print("batch mode        " + " ".join(f"{name:>16}" for name in names))
    for row in rows:
        print(f"{row['batch']:5d} {row['mode']:<11} " + " ".join(f"{row[name]:16.3f}" for name in names))


if __name__ == "__main__":
    main()
