"""What pruned verification costs and saves on the embedded pair: `python benchmarks/pruning.py [--rounds 6]`.

One engine, one thread; batch 4, 8, 16 and 32 by drafts of 3 and 7, the same prompts in every mode, modes taking turns:
none (no drafts), full (every draft verified to full depth), confidence (drafts end where the drafter doubts, at the
threshold that was fastest on other prompts), pruned (trained exit heads), both, gate (both, and the gate decides; it
has learned before), oracle (heads that know which tokens will be accepted: the worth of perfect prediction). Times are
CPU time of the one compute thread, so that other work on the machine counts little. Each cell is written to the JSON
when it is done; a run that is started again goes on behind the last one.
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
from random import Random
from typing import Any, Final

import msgspec
from tables import table

from faser.controller.engine.launch import openmp_library
from faser.controller.engine.machine import machine_facts, versions
from faser.engine_adapter.pruning.verdict import TokenHeads
from faser.models.embedded.pair import ensure_embedded_drafter, ensure_embedded_target
from faser.models.embedded.precision import dtype_on

RESULT: Final = Path(__file__).resolve().parent / "results" / "pruning.json"
MODES: Final = ("none", "full", "confidence", "pruned", "both", "gate", "oracle")
ANSWER_TOKENS = 48
DOUBTS: Final = (0.2, 0.3, 0.4, 0.55, 0.7)  # survival by confidence under which drafts end
GATE_TURNS = 12  # the most that the gate learns for before it is measured


class Oracle(TokenHeads):
    """Exit heads that know the answer: the tokens that the unpruned run of the same prompts emitted."""

    candidates = 0

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

        from faser.engine_adapter.gate import Gate
        from faser.engine_adapter.pruning.forward import Pruning
        from faser.engine_adapter.steering.steering import Steering

        self.llm: Any = LLM(
            options["target"], dtype=dtype_on("cpu"), enforce_eager=True, max_model_len=640, max_num_seqs=64,
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
        self.trained, self.options = self.runner.pruning, options
        if self.trained is None:
            raise RuntimeError(f"the engine does not prune with {options['heads']}; its log says why")
        self.oracle = Oracle(self.runner, (options["oracle_layer"],))
        self.perfect = Pruning(self.runner, self.oracle)
        self.gate = Gate()
        self.prune: Any = None
        self.stop: Any = None
        order, record, bench = Steering.order, Steering.record, self
        self.reports: list[tuple[Any, int, int]] = []  # of each step: its report, draft tokens, emitted tokens

        def ordered(steering: Any, *rest: Any) -> Any:
            made = order(steering, *rest)
            made.prune = made.next_prune = bench.prune
            made.stop = bench.stop
            return made

        def recorded(steering: Any, given: Any, outcome: Any) -> None:
            if outcome.report is not None:
                drafted, emitted = sum(map(len, outcome.drafts.values())), sum(map(len, outcome.sampled))
                bench.reports.append((outcome.report, drafted, emitted))
            record(steering, given, outcome)

        Steering.order, Steering.record = ordered, recorded  # type: ignore[method-assign]
        self.count = 0
        self.answers: dict[tuple[int, ...], list[int]] = {}  # of the last run, by prompt

    def put_into(self, mode: str, length: int, doubt: float) -> None:
        """Put the engine into a mode."""
        from faser.engine_adapter.protocol import Prune, StopRule

        options = self.options
        is_trained = mode in ("pruned", "both", "gate")
        self.steering.default.length = 0 if mode == "none" else length
        self.runner.pruning = self.trained if is_trained else self.perfect if mode == "oracle" else None
        self.runner.gate = self.gate if mode == "gate" else None
        self.runner.drafter.candidates = 0  # with trained heads the runner sets it before each drafting
        self.prune = Prune(options["layer"], options["threshold"]) if is_trained else None
        if mode == "oracle":
            self.prune = Prune(options["oracle_layer"], 0.0)
        ends = mode in ("confidence", "both", "gate")
        self.stop = StopRule([1.0], [0.0], [doubt], [doubt]) if ends else None

    def begin(self, prompts: list[list[int]], answer_tokens: int) -> list[str]:
        """Send the prompts and let the engine read them; return the requests' names."""
        from vllm import SamplingParams

        self.count += 1
        names = [f"{self.count}.{index}" for index in range(len(prompts))]
        params = SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False)
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        for _ in range(2):
            self.engine.step()
        self.reports.clear()
        return names

    def run(
        self, mode: str, prompts: list[list[int]], length: int, doubt: float, answer_tokens: int = ANSWER_TOKENS
    ) -> dict[str, float]:  # fmt: skip
        """Answer the prompts in one mode; only steps without prompt rows are measured."""
        self.put_into(mode, length, doubt)
        self.begin(prompts, answer_tokens)
        steps, answers = [], self.answers
        answers.clear()
        first = sum(entry.request.num_output_tokens for entry in self.steering.entries.values())
        while self.engine.has_unfinished_requests():
            started = time.thread_time()
            outputs = self.engine.step()
            steps.append(time.thread_time() - started)
            for output in outputs:
                if output.finished:
                    answers[tuple(output.prompt_token_ids)] = list(output.outputs[0].token_ids)
        if mode == "full":
            self.oracle.answers = dict(answers)
        tokens = answer_tokens * len(prompts) - first
        verified = sum(drafts for _, drafts, _ in self.reports)
        whole = steps[: len(steps) // 2]  # later on requests have left
        return {
            "tokens_per_s": tokens / sum(steps),
            "step_ms": 1e3 * statistics.median(whole),
            "tokens_per_step": tokens / len(steps) / len(prompts),
            "verified": verified,
            "dropped": sum(sum(report.pruned) for report, _, _ in self.reports) / max(verified, 1),
            "prune_ms": 1e3
            * statistics.median([report.prune_s for report, _, _ in self.reports[: len(whole)]] or [0.0]),
        }

    def prompts(self, count: int, number: int) -> list[list[int]]:
        """Return one set of held-out chat prompts as token ids; no two sets share a prompt while there are enough."""
        from faser.env.workload.prompts import held_out_prompts

        short = [prompt for prompt in held_out_prompts() if prompt.tokens <= 250]
        Random(0).shuffle(short)
        chosen = [short[(number * count + index) % len(short)].text for index in range(count)]
        tokenizer = self.llm.get_tokenizer()
        chats = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
            for text in chosen
        ]
        return [list(chat["input_ids"]) if not isinstance(chat, list) else chat for chat in chats]

    def best_doubt(self, prompts: list[list[int]], length: int) -> float:
        """Return the survival under which it is fastest to end a draft."""
        rates = {doubt: self.run("confidence", prompts, length, doubt)["tokens_per_s"] for doubt in DOUBTS}
        return max(rates, key=lambda one: rates[one])

    def cell(self, batch: int, length: int, rounds: int) -> dict[str, Any]:
        """Measure one batch size and draft length: every mode in every round."""
        from faser.engine_adapter.gate import Gate

        others = self.prompts(batch, 0)
        self.run("full", others, length, 0.0)  # warms up
        doubt = self.best_doubt(others, length)
        self.gate = Gate()
        for _ in range(GATE_TURNS):
            if self.gate.gain(batch) is None:
                self.run("gate", others, length, doubt)
        chance, found = Random(batch), {mode: [] for mode in MODES}
        for number in range(rounds):
            prompts = self.prompts(batch, 1 + number // 2)  # a set of prompts serves two rounds
            order = ["full", *chance.sample([mode for mode in MODES if mode != "full"], len(MODES) - 1)]
            for mode in order:  # the first one tells the oracle
                found[mode].append(self.run(mode, prompts, length, doubt))
        return {
            "batch": batch, "length": length, "confidence": doubt, "layer": self.options["layer"],
            "threshold": self.options["threshold"], "oracle_layer": self.options["oracle_layer"],
            "gain_seen_by_gate": self.gate.gain(batch),
            "rows": [{"mode": mode} | rounded(turns) for mode, turns in found.items()],
        }  # fmt: skip


def rounded(turns: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of a mode's turns, and every turn's tokens/s."""
    row: dict[str, Any] = {name: round(statistics.median(turn[name] for turn in turns), 4) for name in turns[0]}
    return row | {"turns_tokens_per_s": [round(turn["tokens_per_s"], 4) for turn in turns]}


def child(options: dict[str, Any]) -> None:
    """Measure the cells that are asked for; write the file after each."""
    bench, result = Bench(options), Path(options["out"])
    for batch, length in options["cells"]:
        cell = bench.cell(batch, length, options["rounds"])
        keep(result, cell)


def keep(result: Path, cell: dict[str, Any]) -> None:
    """Add a cell to the file."""
    whole = json.loads(result.read_text())
    whole["cells"] = sorted([*whole["cells"], cell], key=lambda one: (one["batch"], one["length"]))
    draft = result.with_suffix(".part")
    draft.write_text(json.dumps(whole, indent=1) + "\n")
    draft.replace(result)
    print(f"batch {cell['batch']}, k {cell['length']}: done", file=sys.stderr)


def measure(options: dict[str, Any], script: str) -> None:
    """Run a script's child in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LD_PRELOAD": str(openmp_library() or ""),
            "FASER_ENDPOINT": f"ipc://{folder}/e.sock",
            "FASER_EXIT_HEADS": options["heads"],
        }  # fmt: skip
        command = [sys.executable, os.path.abspath(script), "--child", json.dumps(options)]
        subprocess.run(command, env=environment, check=True, cwd="/", stdout=subprocess.DEVNULL)


def begun(out: Path, said: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the cells that are done; begin the file anew where it was measured otherwise."""
    whole = json.loads(out.read_text()) if out.is_file() else {}
    if whole.get("settings") != said:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"settings": said, "cells": []}) + "\n")
        return []
    return [(cell["batch"], cell["length"]) for cell in whole["cells"]]


def pair_options(heads: str = "", layer: int = 0, threshold: float = 0.0) -> dict[str, Any]:
    """Return what an engine of the embedded pair needs; heads, layer and threshold are the shipped ones by default."""
    weights = Path(sys.modules["faser.models.embedded.pair"].__file__ or "").parent / "weights"
    file = Path(heads or weights / "exits.safetensors").absolute()
    best = json.loads(file.with_suffix(".card.json").read_text())["best"]
    return {
        "target": str(ensure_embedded_target()), "drafter": str(ensure_embedded_drafter()), "heads": str(file),
        "layer": layer or best["layer"], "threshold": threshold or best["rule"]["threshold"],
    }  # fmt: skip


def main() -> None:
    """Parse, measure what is not there yet, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--batches", default="4,8,16,32")
    parser.add_argument("--lengths", default="3,7")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--heads", default="", help="exit heads; default: the shipped ones")
    parser.add_argument("--layer", type=int, default=0, help="of the trained heads; default: the card's")
    parser.add_argument("--threshold", type=float, default=0.0, help="of the trained heads; default: the card's")
    parser.add_argument("--oracle-layer", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return
    pair = pair_options(given.heads, given.layer, given.threshold)
    said = {
        "heads": Path(pair["heads"]).name, "layer": pair["layer"], "oracle_layer": given.oracle_layer,
        "threshold": pair["threshold"], "rounds": given.rounds, "tokens": ANSWER_TOKENS,
        "machine": msgspec.to_builtins(machine_facts()), "versions": versions(),
    }  # fmt: skip
    done, out = begun(given.out, said), given.out.absolute()
    wanted = [(int(batch), int(length)) for batch in given.batches.split(",") for length in given.lengths.split(",")]
    if missing := [cell for cell in wanted if cell not in done]:
        longest = max(length for _, length in wanted)
        measure(said | pair | {"longest": longest, "cells": missing, "out": str(out)}, __file__)
    print(table(json.loads(out.read_text())))


if __name__ == "__main__":
    main()
