"""One real vLLM engine put through everything at once; run by test_exactness.py as a process of its own.

Reads a scenario as JSON from stdin: model, engine arguments, whether FASER steers, which control breaks it. A real
controller socket in a thread gives every request a new random length at every step; or a real sidecar does so, which
is killed and started again (killed_sidecar.py). Writes outputs and counts.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from faser.engine_adapter import protocol as wire

LONGEST = 6
KINDS = ("logprobs", "penalty", "json", "stop", "many")  # whose verification is not that of a plain request
TEXT = (
    "The lighthouse keeper wrote a letter every evening. He counted the ships that passed, the birds that rested on "
    "the rail, and the hours until dawn. One night a storm came from the north, and the lamp went out. He climbed "
    "the stairs with a candle in his hand, and the wind tried the windows one after the other. In the morning the "
    "harbour was full of boats, and the people of the town came to thank him for the light that had not failed. "
)
QUESTIONS = (
    "Count from one to twenty in words: one, two, three,",
    "Repeat after me: red green blue red green blue red green",
    "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n    return",
    "Question: What is the capital of France?\nAnswer:",
    "A list of fruits: apple, banana, cherry, apple, banana, cherry, apple,",
    "Once upon a time there was a little girl who lived",
)


class RandomController(threading.Thread):
    """A sidecar that answers each record with random lengths, and sometimes not at all."""

    def __init__(self, endpoint: str, seed: int, exit_layers: list[int], is_copying: bool) -> None:
        super().__init__(daemon=True)
        self._is_copying = is_copying
        self._exit_layers = exit_layers
        self.records: list[wire.StepRecord] = []
        self._chance = random.Random(seed)
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)

    def run(self) -> None:
        """Answer until the process ends."""
        while True:
            identity, frame = self._socket.recv_multipart()
            message = wire.decode_from_engine(frame)
            if not isinstance(message, wire.StepRecord):
                continue
            self.records.append(message)
            if self._chance.random() < 0.05:
                continue
            handles = [row.handle for row in message.rows]
            lengths = [self._chance.randint(0, LONGEST) for _ in handles]
            action = wire.ActionSet(
                message.boot_id, 1, len(self.records), message.step + 32, message.time_s + 5.0, 2, handles, lengths,
                stop=random_stop(self._chance), prune=random_prune(self._chance, self._exit_layers),
                match=random_match(self._chance, handles) if self._is_copying else None,
                rest=random_rest(self._chance, handles),
            )  # fmt: skip
            self._socket.send_multipart([identity, bytes(wire.encode(action))])


def random_prune(chance: random.Random, layers: list[int]) -> wire.Prune | None:
    """Return a cut behind one of the layers, and sometimes none."""
    if not layers or chance.random() < 0.1:
        return None
    return wire.Prune(chance.choice(layers), chance.choice([0.0, 0.2, 0.5, 1.0]))


def random_rest(chance: random.Random, handles: list[int]) -> wire.Rest | None:
    """Return who sits out steps, every other time nobody."""
    if chance.random() < 0.5:
        return None
    return wire.Rest(tuple(handle for handle in handles if chance.random() < 0.4), chance.randint(1, 3))


def random_stop(chance: random.Random) -> wire.StopRule | None:
    """Return a rule that ends drafts, every other time none."""

    def some(low: float, high: float) -> list[float]:
        return [chance.uniform(low, high) for _ in range(chance.randint(1, LONGEST))]

    return wire.StopRule(some(0.5, 2), some(-1, 1), some(0, 0.6), some(0, 0.6)) if chance.random() < 0.5 else None


def random_match(chance: random.Random, handles: list[int] | None = None) -> wire.MatchRule | None:
    """Return a rule by which drafts are copied, and sometimes none; some of these requests get a weight."""
    if chance.random() < 0.1:
        return None
    keep, most = [chance.uniform(0.0, 0.5) for _ in range(chance.randint(1, LONGEST))], chance.randint(0, LONGEST)
    worth, fewest = chance.uniform(-0.5, 1.5), chance.choice([0, 1, 1, 3])
    named = tuple(handle for handle in handles or [] if chance.random() < 0.3)
    weights = tuple(chance.uniform(0.2, 5.0) for _ in named)
    least = chance.choice([0.0, 0.0, 1.5])
    slope, intercept = chance.uniform(0.5, 2), chance.uniform(-1, 1)
    return wire.MatchRule([slope], [intercept], keep, most, worth, fewest, named, weights, least)


def counts(records: list[wire.StepRecord]) -> dict[str, Any]:
    """Return what the records say happened."""
    decoding = [[row for row in record.rows if not row.is_prefill] for record in records]
    return {
        "records": len(records),
        "under_lease": sum(record.lease_epoch > 0 for record in records),
        "epochs": sorted({record.lease_epoch for record in records}),
        "mixed": sum(len({row.verified for row in rows}) > 1 for rows in decoding),
        "verified": sum(row.verified for rows in decoding for row in rows),
        "accepted": sum(row.accepted for rows in decoding for row in rows),
        "lengths": sorted({row.verified for rows in decoding for row in rows}),
        "chunked": sum(record.prefill_tokens > 0 and record.decode_tokens > 0 for record in records),
        "events": dict(Counter(event.kind for record in records for event in record.events)),
        "excess": _excess(records),
        "pruned": sum(row.pruned for rows in decoding for row in rows),
        "pruned_kinds": sorted(_pruned_kinds(records)),
        "pruned_layers": sorted(
            {record.prune_layer for record in records if any(row.pruned for row in record.rows)} - {None}
        ),
        "pruned_row_steps": sum(row.pruned > 0 for rows in decoding for row in rows),
        "accepted_beside_pruned": sum(row.accepted for rows in decoding for row in rows if row.pruned),
        "ended_without_bonus": sum(
            row.pruned > 0 and row.accepted == row.verified + 1 - row.pruned for rows in decoding for row in rows
        ),
        "told_wrongly_pruned": sum(record.wrongly_pruned for record in records),
        "saved_rows": sum(record.saved_rows for record in records),
        "decided": sum(
            row.verified > 0
            for record, rows in zip(records, decoding, strict=True)
            if record.prune_layer is not None and any(row.pruned for row in rows)
            for row in rows
        ),
        "looked": sum(record.prune_layer is not None and record.prune_s > 0.0 for record in records),
        "confident": sum(min(len(row.confidences), row.verified) for rows in decoding for row in rows),
        "stopped": sum(len(row.confidences) > row.verified for rows in decoding for row in rows),
        "frontier_hits": sum(record.frontier_hits for record in records),
        "frontier_misses": sum(record.frontier_misses for record in records),
        **_copies(records),
        "miscounted": records[-1].miscounted,
        "rested": sum(record.rested for record in records),
        "dropped": records[-1].dropped,
        "rejected": records[-1].rejected,
    }


def _pruned_kinds(records: list[wire.StepRecord]) -> set[str]:
    """Return the kinds of requests, as `parameters` names them, whose drafts were cut at least once."""
    names = {event.handle: event.request_id for record in records for event in record.events if event.kind == "arrival"}
    cut = {names.get(row.handle, "") for record in records for row in record.rows if row.pruned}
    return {kind for kind in KINDS if any(f"kind-{kind}" in name for name in cut)}


def _copies(records: list[wire.StepRecord]) -> dict[str, int]:
    """Return what became of copied drafts, and in how many steps they were verified beside the drafter's."""
    names = [set(record.verified_copies) for record in records]
    verified = [
        (row.handle in copies, row)
        for record, copies in zip(records, names, strict=True)
        for row in record.rows
        if row.verified
    ]
    mixed = [
        {row.handle in copies for row in record.rows if row.verified}
        for record, copies in zip(records, names, strict=True)
    ]
    return {
        "copied": sum(row.verified for is_copy, row in verified if is_copy),
        "accepted_copies": sum(row.accepted for is_copy, row in verified if is_copy),
        "longest_copy": max((row.verified for is_copy, row in verified if is_copy), default=0),
        "longest_draft": max((row.verified for is_copy, row in verified if not is_copy), default=0),
        "beside_copies": sum(len(kinds) > 1 for kinds in mixed),
        "lost_copies": _lost_copies(records),
    }


def _lost_copies(records: list[wire.StepRecord]) -> int:
    """Return how many were verified that nobody had told of; who rests verifies its own later."""
    told: set[int] = set()
    lost = 0
    for record in records:
        lost += len(set(record.verified_copies) - told)
        told = (told - {row.handle for row in record.rows}) | set(record.copied)
    return lost


def _excess(records: list[wire.StepRecord]) -> int:
    """Count verifications of more tokens than the length latched when they were drafted."""
    latched: dict[int, int] = {}
    excess = 0
    for record in records:
        for row in record.rows:
            excess += row.verified > latched.get(row.handle, 0)
            latched[row.handle] = LONGEST if row.handle in record.copied else row.draft_limit
    return excess


def parameters() -> dict[str, Any]:
    """Return one SamplingParams per kind of request; every one decodes greedily."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    def greedy(**arguments: Any) -> Any:
        return SamplingParams(temperature=0.0, **arguments)

    whole = RequestOutputKind.FINAL_ONLY  # else each of several samples is told by itself, and the last one is kept
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    return {
        "plain": greedy(max_tokens=48, ignore_eos=True),
        "eos": greedy(max_tokens=40),
        "one": greedy(max_tokens=1),
        "two": greedy(max_tokens=2),
        "three": greedy(max_tokens=3, ignore_eos=True),
        "stop": greedy(max_tokens=48, stop=["who was", "One day", "blue"]),  # of two tokens: a draft may have said more
        "many": SamplingParams(temperature=1.0, top_k=1, n=3, max_tokens=20, ignore_eos=True, output_kind=whole),
        "logprobs": greedy(max_tokens=24, logprobs=2, ignore_eos=True),
        "penalty": greedy(max_tokens=32, presence_penalty=0.6, repetition_penalty=1.1, ignore_eos=True),
        "json": greedy(max_tokens=48, structured_outputs=StructuredOutputsParams(json=schema)),
        "choice": greedy(max_tokens=16, structured_outputs=StructuredOutputsParams(choice=["blue whale", "red fox"])),
    }


def chances(logprobs: Any) -> list[dict[int, float]]:
    """Return the log probabilities told with each token, by token id."""
    return [{token: chance.logprob for token, chance in each.items()} for each in logprobs or ()]


class Gauntlet:
    """Drives one engine through three rounds of requests and keeps what each request said."""

    def __init__(self, engine: Any, tokenizer: Any) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.outputs: dict[str, Any] = {}
        self.cached_tokens = 0

    def add(self, name: str, prompt: list[int], parameter: Any) -> None:
        """Queue one request."""
        self.engine.add_request(name, {"prompt_token_ids": prompt}, parameter)

    def drain(self, steps: int | None = None) -> None:
        """Step until all are done, or at most `steps` times."""
        while self.engine.has_unfinished_requests() and steps != 0:
            for output in self.engine.step():
                if output.finished:
                    self.cached_tokens += output.num_cached_tokens or 0
                    said = [(list(c.token_ids), c.finish_reason, c.text, chances(c.logprobs)) for c in output.outputs]
                    self.outputs[output.request_id] = said
            steps = None if steps is None else steps - 1

    def run(self) -> None:
        """Mixed requests, the same again with prefix hits, and aborts in mid-flight."""
        kinds = parameters()
        words = self.tokenizer.encode(TEXT * 3)
        prompts = [self.tokenizer.encode(question) for question in QUESTIONS]
        long = [words[start : start + 100 + 40 * start] for start in range(5)]
        for index, prompt in enumerate([*prompts, *long]):
            self.add(f"plain-{index}", prompt, kinds["plain"])
        for index, kind in enumerate(kinds):
            self.add(f"kind-{kind}", prompts[index % len(prompts)], kinds[kind])
        self.drain()
        for index, prompt in enumerate(long):
            self.add(f"again-{index}", prompt + self.outputs[f"plain-{index + 6}"][0][0], kinds["plain"])
            self.add(f"again-eos-{index}", prompt, kinds["eos"])
        self.drain()
        for index, prompt in enumerate([*prompts, *prompts]):
            self.add(f"abort-{index}", prompt + prompts[(index + 1) % 6], kinds["plain"])
        self.drain(steps=6)
        self.engine.abort_request([f"abort-{index}" for index in (1, 4, 7)])
        self.drain()


def spoil(control: str) -> None:
    """Break verification on purpose: accept every draft, or compare each draft with its neighbour's row."""
    from vllm.v1.sample import rejection_sampler

    from faser.engine_adapter.sampling.seeded_step import SeededStep

    sample, compare = rejection_sampler.rejection_sample, SeededStep.compare

    def accept_all(drafts: Any, counts: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(drafts, counts, *args, **kwargs)
        start = 0
        for row, count in enumerate(counts):
            output[row, :count] = drafts[start : start + count]
            start += count
        return output

    def neighbour(
        drafts: Any, counts: Any, longest: int, ends: Any, q: Any, logits: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return sample(drafts, counts, longest, ends, q, logits.roll(1, dims=0), *args, **kwargs)

    def accept_draws(step: Any, _logits: Any, drafts: Any, bonus: Any, output: Any, *_: Any) -> bool:
        start = 0
        for row, count in enumerate(step.tests):
            output[row, :count] = drafts[start : start + count]
            output[row, count] = bonus[row, 0]
            start += count
        return True

    def neighbours_draws(step: Any, logits: Any, *rest: Any) -> bool:
        return compare(step, logits.roll(1, dims=0), *rest)

    if control:
        rejection_sampler.rejection_sample = {"accept-all": accept_all, "neighbour": neighbour}[control]
        SeededStep.compare = {"accept-all": accept_draws, "neighbour": neighbours_draws}[control]  # type: ignore[method-assign]


class Poison:
    """Answers that somebody else left behind: what the target says, and then a word that it does not say."""

    WORD = 13

    def __init__(self, runner: Any, answers: list[list[int]]) -> None:
        self.copies = 0
        self._runner, self._inherited = runner, runner.copy_drafts
        for answer in answers:
            tokens = [
                word
                for place, token in enumerate(answer)
                for word in ([token, self.WORD] if place % 5 == 4 else [token])
            ]
            runner.texts._histories.add("", np.array(tokens, np.int32))
        runner.copy_drafts = self._copy

    def _copy(self, *args: Any) -> None:
        self._inherited(*args)
        if self._runner.matches is not None:
            self.copies += sum(self.WORD in tokens for tokens in self._runner.matches.tokens.values())


def main(scenario: dict[str, Any]) -> dict[str, Any]:
    """Return outputs and counts."""
    from vllm import LLM

    records: list[wire.StepRecord] = []
    classes = {}
    lives = ExitStack()
    if scenario["steered"]:
        endpoint, exit_layers = scenario["endpoint"], scenario["exit_layers"]
        if scenario["is_killed"]:
            killed: Any = import_module("killed_sidecar")
            records = lives.enter_context(killed.KilledSidecar(endpoint, Path(scenario["result"]).parent)).records
        else:
            controller = RandomController(endpoint, scenario["seed"], exit_layers, scenario["is_copying"])
            controller.start()
            records = controller.records
        classes = {
            "scheduler_cls": "faser.engine_adapter.scheduler.FaserScheduler",
            "worker_cls": "faser.engine_adapter.worker.FaserWorker",
        }
        if exit_layers:
            import_module("coin_heads").install(exit_layers)
        spoil(scenario["control"])
    with lives:
        llm = LLM(scenario["model"], **classes, **scenario["engine"])
        gauntlet = Gauntlet(llm.llm_engine, llm.get_tokenizer())
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        poison = Poison(runner, scenario["poison"]) if scenario["poison"] else None
        gauntlet.run()
    return {
        "outputs": gauntlet.outputs,
        "cached_tokens": gauntlet.cached_tokens,
        "counts": counts(records) if records else {},
        "faults": dict(getattr(runner, "faults", {})),
        "is_pruning": getattr(getattr(runner, "pruning", None), "is_on", None),
        "poisoned_copies": 0 if poison is None else poison.copies,
        "is_copying": getattr(runner, "texts", None) is not None,
        "is_steered": getattr(llm.llm_engine.engine_core.engine_core.scheduler, "steering", None) is not None,
    }


if __name__ == "__main__":
    given = json.load(sys.stdin)
    Path(given["result"]).write_text(json.dumps(main(given)))
