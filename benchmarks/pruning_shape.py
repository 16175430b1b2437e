"""Where a cut pays on a large target: `python benchmarks/pruning_shape.py [--steps 7] [--layers 6] [--batches 8,16]`.

vLLM with random weights in the shape of an 8B Llama's layers (hidden 4096, 32 heads, 8 of keys and values, MLP 14336):
a few layers only, and the vocabulary smaller in the same proportion, on one CPU thread. Neither drafts nor verdicts
mean anything: every request verifies random tokens, and which of them the heads reject is *imposed*, at given rates.
What is real is the time: the step in full, the cut behind a layer with trained heads' own arithmetic and the new
metadata, and the step whose drafts ended where the rejection came (the best that ending them beforehand could do). Arms
take turns step by step. Writes the JSON and docs/pruning.md's table; needs 4 GiB of memory.
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
from typing import Any, Final

import numpy as np
from pruning_report import SHAPE_RESULT, write_tables

from faser.controller.bench_machine import provenance
from faser.controller.launch import openmp_library
from faser.engine_adapter.decision import TokenHeads

WHOLE_LAYERS, WHOLE_VOCABULARY = 32, 128_256  # of the model whose shape it is
SHAPE: Final = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8}
HEAD_RANK, CANDIDATES, PROMPT_TOKENS = 48, 8, 64
SHARES: Final = (0.25, 0.5, 0.75)  # of the layers, behind which is cut
Arm = tuple[str, float, int]  # kind, share of the drafts that is rejected, layer


def surviving(batch: int, length: int, rejected: float) -> list[int]:
    """Return how many draft tokens of each request survive: this share of all is rejected, and drafts differ."""
    chance = np.random.default_rng(7)
    kept = np.zeros(batch, np.int64)
    for _ in range(round(batch * length * (1.0 - rejected))):
        kept[chance.choice(np.flatnonzero(kept < length))] += 1
    return [int(each) for each in kept]


class Imposed(TokenHeads):
    """Exit heads whose verdict is given: the first `kept[request]` tokens pass. They score every token all the same."""

    candidates = 0

    def __init__(self, runner: Any, layers: tuple[int, ...]) -> None:
        import torch

        from faser.engine_adapter.exit_heads import FEATURES, ExitHeads, Head

        self.runner, self.layers, self.kept, self.is_scoring = runner, layers, [0], True
        self.began_s = self.score_s = 0.0  # when the cut began; how long gathering the states and scoring them took
        lm_head = runner.get_model().lm_head.weight
        self.vocabulary, size = lm_head.shape
        shapes = ((size,), (HEAD_RANK, size), (size, HEAD_RANK), (size,), (size,))
        head = Head(*(torch.randn(shape).to(lm_head.dtype) for shape in shapes), torch.randn(len(FEATURES) + 1))
        self._scored = ExitHeads(dict.fromkeys(layers, head), lm_head, CANDIDATES)

    def passes(self, layer: int, threshold: float, checks: Any) -> Any:
        """Score every token, and answer what was imposed."""
        if self.is_scoring:
            self._score(layer, checks)
        self.score_s = time.perf_counter() - self.began_s
        drafts = self.runner.verified.num_draft_tokens
        kept = [self.kept[request_of(name)] for name in self.runner.input_batch.req_ids]
        return np.concatenate([np.arange(count) < most for count, most in zip(drafts, kept, strict=True)])

    def _score(self, layer: int, checks: Any) -> None:
        import torch

        checks.candidates = (checks.tokens[:, None] + torch.arange(1, CANDIDATES + 1)).long() % self.vocabulary
        checks.confidences = torch.full((len(checks.tokens),), 0.5)
        self._scored.accepts(layer, checks)


def request_of(name: str) -> int:
    """Return the number that a request was given."""
    return int(name.split("-")[0])


class Bench:
    """In the child: an engine whose drafts are random tokens, as many as ordered for each request."""

    def __init__(self, options: dict[str, Any]) -> None:
        import random

        from vllm import LLM

        from faser.engine_adapter.pruning import Pruning
        from faser.engine_adapter.steering import Steering

        self.options, self.random = options, random.Random(0)
        self.llm: Any = LLM(
            options["folder"], dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=512, max_num_seqs=max(options["batches"]), max_num_batched_tokens=2048, seed=0,
            enable_prefix_caching=False, async_scheduling=False,
            scheduler_cls="faser.engine_adapter.scheduler.FaserScheduler",
            worker_cls="faser.engine_adapter.worker.FaserWorker",
            speculative_config={
                "method": "ngram", "num_speculative_tokens": options["length"], "prompt_lookup_max": 3,
                "prompt_lookup_min": 2,
            },
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.runner: Any = self.engine.model_executor.driver_worker.worker.model_runner
        depth = options["layers"]
        self.layers = tuple(sorted({round(share * depth) for share in SHARES} & set(range(1, depth))))
        self.heads = Imposed(self.runner, self.layers)
        self.pruning = Pruning(self.runner, self.heads)
        self.lengths = [0]  # of the drafts that are made now
        self.prune: Any = None
        order, cut_rows, bench = Steering.order, Pruning._cut_rows, self

        def timed(pruning: Any, arguments: Any) -> Any:
            bench.heads.began_s = time.perf_counter()
            return cut_rows(pruning, arguments)

        def ordered(steering: Any, *rest: Any) -> Any:
            made = order(steering, *rest)
            made.prune = bench.prune
            return made

        def drafted(*_: Any, **__: Any) -> list[list[int]]:
            chosen = [bench.lengths[request_of(name)] for name in bench.runner.input_batch.req_ids]
            return [[bench.random.randrange(16, bench.heads.vocabulary) for _ in range(each)] for each in chosen]

        Steering.order, Pruning._cut_rows = ordered, timed  # type: ignore[method-assign]
        self.runner.propose_draft_token_ids = drafted
        self.engine.engine_core.engine_core.scheduler.steering.default.length = options["length"]

    def arms(self) -> list[Arm]:
        """Return everything that is compared."""
        cuts: list[Arm] = [("cut", rejected, layer) for rejected in self.options["rejected"] for layer in self.layers]
        ended: list[Arm] = [("ended", rejected, 0) for rejected in self.options["rejected"]]
        return [("none", 0.0, 0), ("full", 0.0, 0), *ended, *cuts]

    def measure(self, batch: int) -> list[dict[str, Any]]:
        """Return a row for each arm: medians over steps, whose arms take turns."""
        from vllm import SamplingParams

        arms, steps = self.arms(), self.options["steps"]
        params = SamplingParams(temperature=0.0, max_tokens=512 - PROMPT_TOKENS, ignore_eos=True, detokenize=False)
        for index in range(batch):
            prompt = [self.random.randrange(16, self.heads.vocabulary) for _ in range(PROMPT_TOKENS)]
            self.engine.add_request(f"{index}", {"prompt_token_ids": prompt}, params)
        turns = [arm for number in range(steps + 1) for arm in self.random.sample(arms, len(arms))]
        found: dict[Arm, list[tuple[float, float, float, float]]] = {arm: [] for arm in arms}
        self.order(turns[0], batch)
        for _ in range(2):  # the prompts, and the first drafts
            self.engine.step()
        for number, (arm, following) in enumerate(zip(turns, [*turns[1:], turns[0]], strict=True)):
            self.begin(arm, batch)
            self.order(following, batch)
            started = time.thread_time()
            self.engine.step()
            step_s = time.thread_time() - started
            if number >= len(arms):  # each arm's first step warms it up
                gone = sum(self.pruning.pruned())
                assert arm[0] != "cut" or gone == batch * self.options["length"] - sum(self.heads.kept)
                found[arm].append((step_s, self.pruning.decide_s, self.heads.score_s, gone))
        self.engine.abort_request([f"{index}" for index in range(batch)])
        self.engine.step()
        return [row_of(batch, arm, self.options["length"], values) for arm, values in found.items()]

    def order(self, arm: Arm, batch: int) -> None:
        """Let the step now under way draft for this arm."""
        kind, rejected, _ = arm
        length = self.options["length"]
        self.lengths = {"none": [0] * batch, "ended": surviving(batch, length, rejected)}.get(kind, [length] * batch)

    def begin(self, arm: Arm, batch: int) -> None:
        """Let the next step verify as this arm says."""
        from faser.engine_adapter.protocol import Prune

        kind, rejected, layer = arm
        is_cut = kind == "cut"
        self.heads.kept, self.heads.score_s = surviving(batch, self.options["length"], rejected), 0.0
        self.runner.pruning, self.prune = (self.pruning, Prune(layer, 0.5)) if is_cut else (None, None)
        self.pruning.forget_step()


def row_of(batch: int, arm: Arm, length: int, values: list[tuple[float, float, float, float]]) -> dict[str, Any]:
    """Return one arm's medians."""
    step_ms, prune_ms, score_ms, gone = (statistics.median(column) for column in zip(*values, strict=True))
    return {
        "batch": batch, "arm": arm[0], "rejected": arm[1], "layer": arm[2], "steps": len(values),
        "step_ms": round(1e3 * step_ms, 3), "step_ms_all": [round(1e3 * each[0], 3) for each in values],
        "prune_ms": round(1e3 * prune_ms, 3), "score_ms": round(1e3 * score_ms, 3),
        "rows_left": gone / (batch * length),
    }  # fmt: skip


def child(options: dict[str, Any]) -> None:
    """Measure, and write the rows to the file named in the options."""
    bench = Bench(options)
    rows = [row for batch in options["batches"] for row in bench.measure(batch)]
    Path(options["result"]).write_text(json.dumps(rows))


def write_model(folder: Path, layers: int, intermediate_size: int = SHAPE["intermediate_size"]) -> None:
    """Write the configuration of a model that has no weights."""
    config = SHAPE | {
        "intermediate_size": intermediate_size,
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_act": "silu",
        "num_hidden_layers": layers, "vocab_size": WHOLE_VOCABULARY * layers // WHOLE_LAYERS, "bos_token_id": 1,
        "eos_token_id": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def measure(options: dict[str, Any], script: str = __file__) -> Any:
    """Run the script's child in a process of its own and return what it wrote."""
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        write_model(Path(folder), options["layers"], options.get("intermediate_size", SHAPE["intermediate_size"]))
        options |= {"folder": folder, "result": f"{folder}/rows.json"}
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LD_PRELOAD": str(openmp_library() or ""),
            "FASER_ENDPOINT": f"ipc://{folder}/e.sock",
        }  # fmt: skip
        command = [sys.executable, os.path.abspath(script), "--child", json.dumps(options)]
        subprocess.run(command, env=environment, check=True, cwd="/", stdout=subprocess.DEVNULL)
        return json.loads(Path(options["result"]).read_text())


def main() -> None:
    """Parse, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batches", default="8,16")
    parser.add_argument("--length", type=int, default=7)
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each arm")
    parser.add_argument("--rejected", default="0.3,0.6,0.9", help="shares of the drafts that are rejected")
    parser.add_argument("--out", type=Path, default=SHAPE_RESULT)
    parser.add_argument("--dry-run", action="store_true", help="print only; nothing is written")
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return
    options = {
        "layers": given.layers, "batches": [int(batch) for batch in given.batches.split(",")], "length": given.length,
        "steps": given.steps, "rejected": [float(share) for share in given.rejected.split(",")],
    }  # fmt: skip
    result = {"options": dict(options), **provenance(), "rows": measure(options)}
    print(json.dumps(result["rows"], indent=1))
    if not given.dry_run:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        write_tables()


if __name__ == "__main__":
    main()
