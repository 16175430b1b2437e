"""Fixtures: `engine` runs `engine_child.py` in a clean environment and reads back what the engine did; `scenario` makes
what a run with a drafter's process is given; `eagle_pair` makes a tiny target with a head that vLLM loads,
`random_target` one alone.
"""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

FORKS = Path(__file__).with_name("engine_forks.py")


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step; lists have one entry per scheduled request."""

    epoch: int  # of the lease; 0: the engine's default
    handles: list[int]
    lengths: list[int]
    scheduled: list[int]
    verified: list[int]
    drafts: list[list[int]]  # the tokens that were verified
    sampled: list[int]
    drafted: list[int]
    confidences: list[list[float]]  # empty: not recorded
    rounds: list[int]
    first_rows: int
    caught_up: int
    copied: int  # requests whose next draft is a copy
    times_s: list[float]
    pruned: list[int]  # rows that left the forward pass; empty: none
    frontiers: list[int]  # hits and misses
    overlap_s: float
    split: int | None  # in force; None: none is offered
    threads: int  # of the target


@dataclass(frozen=True, slots=True)
class Batch:
    """What became of one `generate` call."""

    tokens: list[list[list[int]]]  # request, sample, token
    steps: list[Step]
    compared: list[dict[str, list[int]]]  # drafts of the process and of vLLM's own drafter for the same rows
    chances: list[list[list[dict[str, float]]]]  # request, sample, token: log probabilities by token id

    def acceptance(self) -> tuple[int, int]:
        """Return (accepted, verified) draft tokens; a request's last step is cut by max_tokens and left out."""
        last = {handle: number for number, step in enumerate(self.steps) for handle in step.handles}
        accepted = verified = 0
        for number, step in enumerate(self.steps):
            for handle, drafts, sampled in zip(step.handles, step.verified, step.sampled, strict=True):
                if drafts and last[handle] != number:
                    verified += drafts
                    accepted += sampled - 1
        return accepted, verified


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What became of one engine."""

    batches: list[Batch]
    drafter: str
    is_ragged: bool | None
    faults: dict[str, int]
    is_pruning: bool | None = None  # None: without exit heads; False: after a failure
    gate: list[tuple[int, bool, float, int]] = field(default_factory=list)  # what the gate was told, step by step


def engine_environment(folder: Path) -> dict[str, str]:
    """Return a clean environment for an engine in this process's own core."""
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        "KMP_BLOCKTIME": "0",
        "FASER_ENDPOINT": f"ipc://{folder}/e.sock",
    }
    openmp = next(Path(sys.prefix).rglob("libiomp5.so"), None)
    if openmp is not None:
        environ["LD_PRELOAD"] = str(openmp)
    return environ


class ForkProcess:
    """A process that imports vLLM once and does each job in a fork of itself (fork_server.py)."""

    def __init__(self, script: Path, folder: Path, environment: dict[str, str]) -> None:
        with (folder / "forks.log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(script)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=folder,
            )  # fmt: skip
        if self._said() != "ready":
            self.close()
            raise RuntimeError((folder / "forks.log").read_text()[-4000:])

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def do(self, job: dict[str, Any]) -> None:
        """Do a job; raise AssertionError with the end of its log if it failed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        status = self._said()
        assert status == "0", f"ended with {status}: {Path(job['log']).read_text()[-12000:]}"

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with self._process:
            self._process.stdin.close()


@pytest.fixture(scope="session")
def fork_process() -> type[ForkProcess]:
    """Return ForkProcess, for the folders below."""
    return ForkProcess


class EngineForks:
    """Engines one after the other; `folder` is private and short enough for a socket."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        folder.chmod(0o700)
        self._folder, self._environment = folder, engine_environment(folder) | (environment or {})
        self._process = ForkProcess(FORKS, folder, self._environment)

    def run(self, scenario: dict[str, Any], environment: dict[str, str] | None = None) -> EngineRun:
        """Run one scenario."""
        if "OMP_NUM_THREADS" in (environment or {}):  # the library reads it once, when it is loaded
            return self._run_apart(scenario, environment)
        result, log = self._folder / "result.json", self._folder / "engine.log"
        result.unlink(missing_ok=True)
        job = {
            "scenario": {**scenario, "result": str(result)},
            "environment": self._environment | (environment or {}),
            "folder": str(self._folder),
            "log": str(log),
        }
        self._process.do(job)
        seen = json.loads(result.read_text())
        batches = [Batch(**(batch | {"steps": [Step(**step) for step in batch["steps"]]})) for batch in seen["batches"]]
        return EngineRun(batches, seen["drafter"], seen["is_ragged"], seen["faults"], seen["is_pruning"], seen["gate"])

    def _run_apart(self, scenario: dict[str, Any], environment: dict[str, str] | None) -> EngineRun:
        """Run a scenario in a fork of another process."""
        with tempfile.TemporaryDirectory(prefix="faser-") as folder:
            other = EngineForks(Path(folder), environment)
            try:
                return other.run(scenario)
            finally:
                other.close()

    def close(self) -> None:
        """End the process."""
        self._process.close()


@pytest.fixture(scope="session")
def engine() -> Iterator[Callable[..., EngineRun]]:
    """Return `run(scenario, environment)`, each time in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        forks = EngineForks(Path(folder))
        yield forks.run
        forks.close()


@pytest.fixture(scope="session")
def scenario() -> Callable[..., dict[str, Any]]:
    """What a run with a drafter's process is given: the embedded target, little memory, prompts in chunks."""
    from faser.models.embedded.pair import ensure_embedded_target

    def make(blocks: int, process: dict[str, Any] | None, *batches: dict[str, Any], **speculation: Any) -> Any:
        """Process None: no speculation; blocks of 128 tokens each."""
        given = {} if process is None else {"process": process}
        small = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        drafting = {} if process is None else {"speculative_config": speculation}
        common = {"dtype": "float32", "enforce_eager": True, "num_gpu_blocks_override": blocks}
        return {
            "model": str(ensure_embedded_target()),
            "is_steered": process is not None,
            "engine": common | small | drafting,
            "batches": list(batches),
            **given,
        }

    return make


VOCABULARY, HIDDEN, WIDE, HEADS, HEAD = 64, 128, 256, 2, 64
DRAFT_IDS = [token for token in range(VOCABULARY) if token % 5]  # what the EAGLE-3 head can draft
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="session")
def eagle_pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return `make(method)`: folders of a tiny random Llama and of its head for method `eagle` or `eagle3`.

    In place of training, least squares let the head guess the target's next state: it is right often enough.
    """

    def make(method: str) -> tuple[Path, Path]:
        target, head = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp(method)
        model = _random_llama()
        _save(target, model.state_dict(), {})
        if method == "eagle":
            _save(head, _eagle_1(model), {"num_hidden_layers": 1})
        else:
            layers = {"eagle_config": {"use_aux_hidden_state": True}, "eagle_aux_hidden_state_layer_ids": [0, 1]}
            sizes = {"num_hidden_layers": 1, "num_aux_hidden_states": 2, "draft_vocab_size": len(DRAFT_IDS)}
            _save(head, _eagle_3(model), sizes | layers)
        return target, head

    return make


def _save(folder: Path, weights: dict[str, Any], changes: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(TINY | named | changes))


@pytest.fixture(scope="session")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return `make(**changes)`: the folder of a tiny random Llama whose configuration has these changes."""

    def make(**changes: Any) -> Path:
        target = tmp_path_factory.mktemp("target")
        _save(target, _random_llama(changes).state_dict(), changes)
        return target

    return make


def _random_llama(changes: dict[str, Any] | None = None) -> Any:
    """Return a target of whose next state the newest token says much, but not all."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**(TINY | (changes or {})))).float().eval()
    gains = {"embed_tokens": HIDDEN**0.5, "o_proj": 0.5, "down_proj": 0.5, "lm_head": 2.5}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, gains.get(name.split(".")[-2], 1.3) * weight.shape[1] ** -0.5)
    return model


def _layer(name: str, reads: int) -> dict[str, Any]:
    """Return a decoder layer of random weights that adds a little to what is fitted."""
    import torch

    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, reads), "self_attn.k_proj": (HEAD, reads),
        "self_attn.v_proj": (HEAD, reads), "self_attn.o_proj": (HIDDEN, HEADS * HEAD), "mlp.gate_proj": (WIDE, HIDDEN),
        "mlp.up_proj": (WIDE, HIDDEN), "mlp.down_proj": (HIDDEN, WIDE),
    }  # fmt: skip
    weights = {f"{name}.{part}.weight": torch.randn(shape) * shape[1] ** -0.5 for part, shape in shapes.items()}
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"{name}.{part}.weight"] *= 0.3
    return weights | {f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN)}


def _said(model: Any) -> tuple[Any, list[Any]]:
    """Return random texts (texts, tokens) and the target's states (texts, tokens, hidden) between its layers."""
    import torch

    texts = torch.randint(0, VOCABULARY, (256, 24))
    with torch.no_grad():
        return texts, list(model.model(texts, output_hidden_states=True).hidden_states)


def _fit(seen: Any, wanted: Any) -> Any:
    """Return the matrix (wanted, seen) that maps the one best to the other; both are (texts, tokens, ...)."""
    import torch

    x, y = seen.flatten(0, 1).double(), wanted.flatten(0, 1).double()
    return torch.linalg.solve(x.T @ x + torch.eye(x.shape[1]), x.T @ y).float().T


def _eagle_1(model: Any) -> dict[str, Any]:
    """It reads the next token's embedding and the target's last state, and shares embedding and LM head."""
    import torch

    texts, states = _said(model)
    embedded = model.model.embed_tokens.weight.detach()[texts[:, 1:]]
    fitted = _fit(torch.cat([embedded, states[-1][:, :-1]], -1), states[-1][:, 1:])
    return _layer("layers.0", HIDDEN) | {"fc.weight": fitted}


def _eagle_3(model: Any) -> dict[str, Any]:
    """It reads the next token by attention, which looks mostly at the newest one, and two layers' states."""
    import torch

    texts, states = _said(model)
    embedding = model.model.embed_tokens.weight.detach()
    normed = embedding * (embedding.square().mean(-1, keepdim=True) + TINY["rms_norm_eps"]).rsqrt()
    wanted = torch.cat([torch.ones(VOCABULARY, 1), torch.eye(VOCABULARY)], 1)
    constant, one_hot = (torch.linalg.pinv(normed) @ wanted).T.split([1, VOCABULARY])
    said = torch.eye(VOCABULARY)[texts[:, 1:]]
    fitted = _fit(torch.cat([said, states[0][:, :-1], states[1][:, :-1]], -1), states[-1][:, 1:])
    blind = torch.zeros(HEAD, HIDDEN)  # attention leaves the states out
    same = 3.0 * constant.expand(HEAD, HIDDEN)  # the same query and key for all, so that only the distance counts
    weights = _layer("midlayer", 2 * HIDDEN) | {
        "midlayer.self_attn.q_proj.weight": torch.cat([same, blind], 1).repeat(HEADS, 1),
        "midlayer.self_attn.k_proj.weight": torch.cat([same, blind], 1),
        "midlayer.self_attn.v_proj.weight": torch.cat([one_hot, blind], 1),
        "midlayer.self_attn.o_proj.weight": fitted[:, :VOCABULARY].repeat(1, HEADS) / HEADS,
        "fc.weight": fitted[:, VOCABULARY:],
        "lm_head.weight": model.lm_head.weight.detach()[DRAFT_IDS],
        "d2t": torch.tensor(DRAFT_IDS) - torch.arange(len(DRAFT_IDS)),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    return weights | {f"{name}.weight": torch.ones(HIDDEN) for name in norms}


@pytest.fixture
def vllm_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Return what comes out of a handler under vLLM's own configuration of its logger."""
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    logger, configured = logging.getLogger("vllm"), DEFAULT_LOGGING_CONFIG["loggers"]["vllm"]
    written, level = io.StringIO(), logger.level
    handler = logging.StreamHandler(written)
    handler.setLevel(DEFAULT_LOGGING_CONFIG["handlers"]["vllm"]["level"])
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "propagate", configured["propagate"])
    logger.setLevel(configured["level"])
    yield written
    logger.setLevel(level)
