"""What one engine on the real V2 runner does in a fork of forks.py; each job takes and returns JSON."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import interpreter
from managers import Manager
from steer import Govern, Steer, rule_of
from tiny_models import VOCABULARY, save_llama

SMALL: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 64, "skip_tokenizer_init": True, "seed": 0,
}  # fmt: skip
FASER = {
    "scheduler_cls": "faser.engine_adapter.scheduler.FaserScheduler",
    "worker_cls": "faser.engine_adapter.worker.FaserWorker",
}

# Milliseconds of drafting by requests, of verifying by tokens: a step costs a base and, from 8 tokens on, each token.
CURVES = ([(1, 1.0), (8, 1.0)], [(1, 4.0), (8, 4.0), (16, 6.0), (64, 18.0)])


def prompts(lengths: tuple[int, ...], vocabulary: int, seed: int = 3) -> list[Any]:
    """Return random prompts."""
    chance = random.Random(seed)
    return [{"prompt_token_ids": [chance.randrange(3, vocabulary) for _ in range(length)]} for length in lengths]


class Engine:
    """One LLM as a scenario says, with FASER where it has a rule."""

    def __init__(self, given: dict[str, Any]) -> None:
        named: dict[str, Any] = SMALL | given.get("engine", {}) | {"async_scheduling": given.get("is_async", False)}
        if given.get("is_async"):
            interpreter.keep_async_scheduling()
        if "speculation" in given:
            named["speculative_config"] = given["speculation"]
        if given.get("speculation", {}).get("enable_adaptive_verification"):
            interpreter.allow_adaptive_verification()
        if given.get("speculation", {}).get("draft_sample_method") == "probabilistic":
            interpreter.log1p_by_log()
        self.steer: Steer | None = None
        if "rule" in given:
            splits = 1 + len(given.get("splits", ()))
            self.steer = Steer(rule_of(given["rule"]), given.get("admission"), given.get("is_resting", False), splits)
            named |= FASER
        self.govern: Govern | None = None
        if "policy" in given:
            self.govern = Govern(given["policy"])
            named |= FASER
        from vllm import LLM

        self.llm: Any = LLM(given["model"], **named)
        self.core = self.llm.llm_engine
        self.scheduler = self.core.engine_core.engine_core.scheduler
        self.runner = self.core.model_executor.driver_worker.worker.model_runner
        if self.runner.adaptive_verification is not None:  # vLLM measures these while it captures graphs
            self.runner.adaptive_verification.set_cost_curves(*given.get("curves", CURVES))
        self.calls: Counter[str] = Counter()
        self.gate: list[dict[str, Any]] = []
        self._count_passes()
        CONTROLS[given.get("control", "")](self)

    def _count_passes(self) -> None:
        """Count how often the drafter's model and its LM head run; a search has none."""
        speculator = getattr(self.runner, "speculator", None)
        for name in ("_run_model", "compute_draft_logits"):
            if (inherited := getattr(speculator, name, None)) is not None:
                setattr(speculator, name, partial(self._counted, name, inherited))

    def _counted(self, name: str, inherited: Any, *args: Any, **named: Any) -> Any:
        self.calls[name] += 1
        return inherited(*args, **named)

    def facts(self) -> dict[str, Any]:
        """Return what kind of engine it is, and what FASER saw."""
        import vllm

        return {
            "runner": type(self.runner).__name__,
            "home": next(c.__module__ for c in type(self.runner).__mro__ if c.__name__ == "CPUModelRunner"),
            "speculator": type(getattr(self.runner, "speculator", None)).__name__,
            "scheduler": type(self.scheduler).__name__,
            "is_async": bool(self.scheduler.scheduler_config.async_scheduling),
            "is_steered": getattr(self.scheduler, "steering", None) is not None,
            "faults": dict(getattr(self.runner, "faults", {})),
            "version": vllm.__version__,
            "passes": self.calls["_run_model"],
            "heads": self.calls["compute_draft_logits"],
            "check": self.steer.check() if self.steer else None,
            "log": self.steer.log if self.steer else [],
            "miscounted": self._miscounted(),
            "gate": self.gate,
            "hello_rounds": self._hello_rounds(),
            "governed": self.govern.facts() if self.govern else None,
        }

    def _hello_rounds(self) -> str | None:
        steering = getattr(self.scheduler, "steering", None)
        return None if steering is None else str(steering.hello.rounds)

    def _miscounted(self) -> int:
        steering = getattr(self.scheduler, "steering", None)
        return 0 if steering is None else int(steering._builder.miscounted)


def _whole(_: Engine) -> None:
    """Break nothing."""


def _neighbour_rows(engine: Engine) -> None:
    """Let each draft be judged by its neighbour's logits."""
    sample = engine.runner.sample

    def rolled(hidden: Any, batch: Any, *rest: Any) -> Any:
        if batch.num_draft_tokens:
            batch.logits_indices = batch.logits_indices.roll(1)
        return sample(hidden, batch, *rest)

    engine.runner.sample = rolled


def _no_masks(engine: Engine) -> None:
    """Let grammars forbid nothing."""
    engine.runner.structured_outputs_worker.apply_grammar_bitmask = lambda *_: None


def _uncut_placeholders(engine: Engine) -> None:
    """Leave each request as many placeholders as the longest draft has."""
    type(engine.scheduler).after_latch = lambda *_: None


def _failing(name: str) -> Callable[[Engine], None]:
    return lambda engine: setattr(engine.runner, name, _raise)


def _failing_rounds(engine: Engine) -> None:
    """Let ragged drafting fail in the middle of a step, behind rounds that went well."""
    from faser.engine_adapter.patches.speculators.rounds import DecodeRounds

    run, count = DecodeRounds.run, iter(range(100))

    def failing(rounds: DecodeRounds, step: int, rows: list[int]) -> None:
        run(rounds, step, rows)
        if next(count) == 4:
            raise RuntimeError("broken on purpose")

    DecodeRounds.run = failing  # type: ignore[method-assign]


def _failing_confidences(engine: Engine) -> None:
    from faser.engine_adapter.drafting.late_confidences import LateConfidences

    LateConfidences.take = _raise  # type: ignore[method-assign]


def _raise(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken on purpose")


def _neighbours_rounds(engine: Engine) -> None:
    """Let each row that goes on drafting carry on the state of its neighbour."""
    from faser.engine_adapter.patches.speculators.rounds import DecodeRounds

    keep = DecodeRounds.keep
    DecodeRounds.keep = lambda rounds, places: keep(rounds, places[1:] + places[:1])  # type: ignore[method-assign]


def _failing_numbers(engine: Engine) -> None:
    from faser.engine_adapter.patches.v2_verification import VerificationNumbers

    VerificationNumbers.weights_on_host = _raise  # type: ignore[method-assign]


def _vllms_rule(engine: Engine) -> None:
    """Let vLLM's rejection rule say what requests with a seed say."""
    del engine.runner.rejection_sampler._verify


def _neighbours_proposals(engine: Engine) -> None:
    """Let each draft that was drawn at random be judged by the distribution of another round."""
    sampler = engine.runner.rejection_sampler
    verify = sampler._verify
    sampler._verify = lambda logits, proposals, *rest: verify(logits, proposals.roll(1, 1), *rest)


def _failing_draws(engine: Engine) -> None:
    from faser.engine_adapter.runner import v2

    v2.amended = _raise


def _overheard_gate(engine: Engine) -> None:
    """Write down what the gate of drafting rounds is asked and told, each time with the newest step's number."""
    from faser.engine_adapter.gate import Gate

    ask, note = Gate.ask, Gate.note

    def asked(gate: Gate, requests: int) -> bool:
        answer = ask(gate, requests)
        engine.gate.append({"step": engine.runner.order.step, "asked": requests, "answer": answer})
        return answer

    def noted(gate: Gate, requests: int, has_used: bool, time_s: float, tokens: int) -> None:
        engine.gate.append({"step": engine.runner.order.step, "told": [requests, has_used, time_s, tokens]})
        note(gate, requests, has_used, time_s, tokens)

    Gate.ask, Gate.note = asked, noted  # type: ignore[method-assign]


CONTROLS: dict[str, Callable[[Engine], None]] = {
    "": _whole,
    "vLLM's rule": _vllms_rule,
    "neighbour's proposals": _neighbours_proposals,
    "failing draws": _failing_draws,
    "neighbour rows": _neighbour_rows,
    "no masks": _no_masks,
    "uncut placeholders": _uncut_placeholders,
    "failing report": _failing("_attach"),
    "failing look": _failing("_note_rows"),
    "failing rounds": _failing_rounds,
    "failing confidences": _failing_confidences,
    "neighbour's rounds": _neighbours_rounds,
    "failing numbers": _failing_numbers,
    "overheard gate": _overheard_gate,
    "failing copy": lambda engine: setattr(engine.runner.verification, "_copy", _raise),
}


def generate(given: dict[str, Any]) -> dict[str, Any]:
    """Let a handful of requests run together; greedy unless `sampling` says otherwise."""
    from vllm import SamplingParams

    os.environ.update(given.get("environment", {}))
    engine = Engine(given)
    plain = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
    asked = prompts(tuple(given.get("prompts", (5, 17, 40, 90))), given.get("vocabulary", VOCABULARY))
    started = time.monotonic()
    kinds = [plain | given.get("sampling", {}) | kind for kind in given.get("samplings", [{}])]
    parameters = [SamplingParams(**_with_grammar(kinds[place % len(kinds)])) for place in range(len(asked))]
    done = engine.llm.generate(asked, parameters, use_tqdm=False)
    tokens = [[list(output.token_ids) for output in request.outputs] for request in done]
    logprobs = [logprobs_of(output) for request in done for output in request.outputs]
    return engine.facts() | {"tokens": tokens, "logprobs": logprobs, "seconds": time.monotonic() - started}


def _with_grammar(kind: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a request with its grammar as vLLM has it."""
    from vllm.sampling_params import StructuredOutputsParams

    grammar = kind.get("structured_outputs")
    return kind if grammar is None else kind | {"structured_outputs": StructuredOutputsParams(**grammar)}


def everything(given: dict[str, Any]) -> dict[str, Any]:
    """Put one engine through all that vLLM does in a batch.

    Prompts in chunks, prefix hits, preemption, several answers to a prompt, penalties, logprobs, stop tokens, short
    limits, aborts in flight.
    """
    engine = Engine({"engine": {"block_size": 32, "num_gpu_blocks_override": 22}} | given)
    gauntlet = Gauntlet(engine, given.get("vocabulary", VOCABULARY))
    with counted(engine) as preemptions:
        gauntlet.run()
    return engine.facts() | {"outputs": gauntlet.outputs, "preemptions": len(preemptions), "cached": gauntlet.cached}


@contextmanager
def counted(engine: Engine) -> Iterator[list[str]]:
    """Yield a list that grows by each preempted request."""
    kind = type(engine.scheduler)
    inherited, seen = kind._preempt_request, []

    def preempt(scheduler: Any, request: Any, *rest: Any, **named: Any) -> Any:
        seen.append(request.request_id)
        return inherited(scheduler, request, *rest, **named)

    kind._preempt_request = preempt
    try:
        yield seen
    finally:
        kind._preempt_request = inherited


class Gauntlet:
    """The requests of `everything`, and what became of them."""

    def __init__(self, engine: Engine, vocabulary: int) -> None:
        self.core, self.outputs, self.cached = engine.core, {}, 0  # type: ignore[var-annotated]
        chance = random.Random(7)
        self.long, self.short = (
            [[chance.randrange(3, vocabulary) for _ in range(n)] for n in lengths]
            for lengths in ((90, 120, 150, 75), (4, 9, 17, 33))
        )

    def run(self) -> None:
        """Add the requests in three waves."""
        kinds = parameters()
        for place, prompt in enumerate(self.long + self.short):
            self.add(f"plain-{place}", prompt, kinds["plain"])
        for place, (name, kind) in enumerate(kinds.items()):
            self.add(f"kind-{name}", self.short[place % 4], kind)
        self.drain()
        for place, prompt in enumerate(self.long):
            self.add(f"again-{place}", prompt + self.outputs[f"plain-{place}"][0][0], kinds["plain"])
        self.drain()
        for place in range(6):
            self.add(f"abort-{place}", self.short[place % 4] + self.long[place % 3][: 20 + place], kinds["plain"])
        self.drain(6)
        self.core.abort_request(["abort-1", "abort-4"])
        self.drain()

    def add(self, name: str, prompt: list[int], parameters: Any) -> None:
        """Queue a request."""
        self.core.add_request(name, {"prompt_token_ids": prompt}, parameters)

    def drain(self, limit: int | None = None) -> None:
        """Step until nothing is left, or `limit` times."""
        while self.core.has_unfinished_requests() and limit != 0:
            for done in self.core.step():
                if done.finished:
                    self.cached += done.num_cached_tokens or 0
                    self.outputs[done.request_id] = [
                        [list(one.token_ids), one.finish_reason, logprobs_of(one)] for one in done.outputs
                    ]
            limit = None if limit is None else limit - 1


def logprobs_of(output: Any) -> list[dict[str, float]]:
    """Return the told logprobs, rounded: another batch sums in another order."""
    return [{str(token): round(seen.logprob, 4) for token, seen in each.items()} for each in output.logprobs or ()]


def parameters() -> dict[str, Any]:
    """Return one SamplingParams for each kind of request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    common: dict[str, Any] = {"temperature": 0.0, "detokenize": False}
    free = common | {"ignore_eos": True}
    several = free | {"temperature": 1.0, "top_k": 1, "n": 3, "output_kind": RequestOutputKind.FINAL_ONLY}
    return {
        "plain": SamplingParams(max_tokens=30, **free),
        "one": SamplingParams(max_tokens=1, **common),
        "two": SamplingParams(max_tokens=2, **common),
        "three": SamplingParams(max_tokens=3, **free),
        "stop": SamplingParams(max_tokens=30, stop_token_ids=list(range(40, 60)), **free),
        "logprobs": SamplingParams(max_tokens=16, logprobs=2, **free),
        "penalty": SamplingParams(max_tokens=20, presence_penalty=0.6, repetition_penalty=1.1, **free),
        "many": SamplingParams(max_tokens=12, **several),
    }


def save_model(given: dict[str, Any]) -> str:
    """Write a tiny model."""
    return str(save_llama(Path(given["folder"]), noise=given["noise"]))


def admissions(given: dict[str, Any]) -> dict[str, int]:
    """Let vLLM's manager, and one that is asked with FASER's numbers, admit drafts of random batches.

    `weight` is that of every other request, `slowness` a factor on what more than 16 tokens cost.
    """
    chance = random.Random(5)
    own, ours = Manager(given), Manager(given)
    order = ours.ask_with(given["slowness"], given["weight"])
    same = first_gained = first_lost = trimmed = resized = 0
    for _ in range(given["batches"]):
        batch = own.random_batch(chance)
        plain, asked = own.admit(batch), ours.admit(batch, order)
        same += plain == asked
        trimmed += sum(plain[1]) < sum(batch.lengths)
        resized += plain[0] != asked[0]
        first_gained += sum(asked[1][::2]) > sum(plain[1][::2])
        first_lost += sum(asked[1][::2]) < sum(plain[1][::2])
    return {"same": same, "trimmed": trimmed, "resized": resized, "gained": first_gained, "lost": first_lost}


def sampled(given: dict[str, Any]) -> dict[str, float]:
    """Sample many answers to one prompt, and hold them against the target's own distribution.

    :param given: a scenario of the models that `test_sampling.tiny_model` writes; `requests`, `temperature`
    """
    sys.path.append(str(Path(__file__).parent.parent))
    sampling: Any = import_module("test_sampling")
    from vllm import SamplingParams

    crowd = {"max_num_seqs": given.get("together", 64), "max_num_batched_tokens": 512, "max_model_len": 64, "seed": 11}
    engine = Engine(given | {"engine": crowd})
    params = SamplingParams(
        temperature=given["temperature"], top_k=sampling.TOP_K, max_tokens=sampling.EMITTED, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip
    asked: Any = [{"prompt_token_ids": sampling.PROMPT}] * given["requests"]
    done = engine.llm.generate(asked, params, use_tqdm=False)
    tokens = [[list(output.token_ids) for output in request.outputs] for request in done]
    rows = [row for entry in engine.facts()["log"] for row in entry["rows"].values() if row["verified"]]
    expected = sampling.exact(Path(given["model"]), given["temperature"])
    return engine.facts() | {
        "log": [],
        "p_value": sampling.p_value(tokens, expected),
        "accepted": sum(row["accepted"] for row in rows) / max(sum(row["verified"] for row in rows), 1),
    }


def save_sampled_models(given: dict[str, Any]) -> list[str]:
    """Write the target and the disturbed drafter of `sampled`."""
    sys.path.append(str(Path(__file__).parent.parent))
    folders = [str(Path(given["folder"]) / name) for name in ("target", "drafter")]
    for folder, noise in zip(folders, (0.0, 0.12), strict=True):
        import_module("test_sampling").tiny_model(Path(folder), noise)
    return folders
