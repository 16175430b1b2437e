"""One real vLLM engine in a process of its own, steered by lengths that the test chooses.

Run by `engine_forks.py`, in a fork of a process that has vLLM imported.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from faser.engine_adapter.drafter_process.target_states import TargetStates
from faser.engine_adapter.drafting import ragged
from faser.engine_adapter.drafting.catch_up import CatchUp
from faser.engine_adapter.protocol import ActionSet, MatchRule, Prune, StopRule
from faser.engine_adapter.sampling import seeded_step
from faser.engine_adapter.steering import steering
from faser.engine_adapter.steering.lease import fitted_match
from faser.engine_adapter.steering.orders import StepOrder
from faser.engine_adapter.steering.record import Entry
from faser.engine_adapter.steering.steering import BatchOutcome, Steering

Log = list[dict[str, Any]]
SEQUENCE = itertools.count(1)  # of the late leases, over all batches
Rule = Callable[[int], int]  # handle -> draft length
Stop = Callable[[], StopRule | None]  # the stop rule of the next step
Matching = Callable[[], MatchRule | None]  # when the next step copies
Prunes = Callable[[], Prune | None]  # where the next step is cut


class Driver:
    """Stands in for the sidecar: a rule instead of leases, and a log instead of records."""

    def __init__(self) -> None:
        self.rule: Rule | None = lambda handle: 0  # None: what the leases say
        self.stop: Stop = lambda: None
        self.prune: Prunes = lambda: None
        self.match: Matching = lambda: None
        self.frontier = 0
        self.split: Callable[[], int] | None = None  # that the next step is asked for; None: what the leases say
        self.is_leased = False  # then leases say all of this
        self.log: Log = []
        self.runner: Any = None
        self.handles: dict[str, int] = {}  # of all who were ever scheduled: a report may come after its request left
        driver = self

        def lengths(
            scheduled: dict[str, int], entries: dict[str, Entry], *limits: Any
        ) -> tuple[dict[str, int], dict[str, int]]:
            rule, (lengths, copies) = driver.rule, leased(scheduled, entries, *limits)
            if rule is not None:
                lengths = {name: rule(entries[name].handle) for name in scheduled}
            return lengths, copies

        def record(steering: Steering, order: StepOrder, outcome: BatchOutcome) -> None:
            driver.note(order, outcome)
            inherited(steering, order, outcome)

        def order(steering: Steering, scheduled: dict[str, int], started_s: float) -> StepOrder:
            driver.handles |= {name: steering.entries[name].handle for name in scheduled}
            ordered = inherited_order(steering, scheduled, started_s)
            if not driver.is_leased:
                ordered.stop, ordered.prune = driver.stop(), driver.prune()
                ordered.frontier = driver.frontier
                if driver.split is not None:
                    ordered.split = driver.split()
                if (match := driver.match()) is not None:
                    ordered.match = fitted_match(match, steering.hello.copy_max)
                    ordered.match_lengths = dict.fromkeys(scheduled, ordered.match.most)
            return ordered

        inherited, leased, inherited_order = Steering.record, steering.latched, Steering.order
        Steering.order = order  # type: ignore[method-assign]
        steering.latched = lengths  # type: ignore[assignment]
        Steering.record = record  # type: ignore[method-assign]

    def note(self, order: StepOrder, outcome: BatchOutcome) -> None:
        """Log one step, one list entry per scheduled request."""
        import torch

        names, report = list(outcome.scheduled), outcome.report
        assert report is not None, "the runner left no report"
        self.log.append(
            {
                "epoch": order.lease_epoch,
                "handles": [self.handles[name] for name in names],
                "lengths": [order.lengths[name] for name in names],
                "scheduled": [outcome.scheduled[name] for name in names],
                "verified": [len(outcome.drafts.get(name, ())) for name in names],
                "drafts": [list(outcome.drafts.get(name, ())) for name in names],
                "sampled": [outcome.sampled.counts[outcome.row_of[name]] for name in names],
                "drafted": [report.drafted[outcome.row_of[name]] for name in names],
                "confidences": [report.confidences[outcome.row_of[name]] for name in names]
                if report.confidences
                else [],
                "rounds": list(report.rounds or ()),
                "first_rows": getattr(self.runner.drafter, "first_rows", 0),
                "caught_up": report.caught_up,
                "copied": len(report.copied),
                "pruned": [report.pruned[outcome.row_of[name]] for name in names] if report.pruned else [],
                "frontiers": [report.frontier_hits, report.frontier_misses],
                "overlap_s": report.overlap_s,
                "split": report.split,
                "threads": torch.get_num_threads(),
                "times_s": [report.verify_s, report.sample_s, report.draft_s, report.runner_s],
            }
        )


def rule_of(spec: dict[str, Any]) -> Rule | None:
    """Return lengths cyclic over requests, or random for each request and step; None: as leases say."""
    if "late" in spec or "leased" in spec:
        return None
    if "cycle" in spec:
        cycle = spec["cycle"]
        return lambda handle: cycle[(handle - 1) % len(cycle)]
    if "phases" in spec:
        return _phases(spec["phases"], spec["seed"])
    chance = random.Random(spec["seed"])
    return lambda handle: chance.randint(0, spec["random"])


def match_of(seed: int | None) -> Matching:
    """Return random rules, one for each step and sometimes none."""
    if seed is None:
        return lambda: None
    chance = random.Random(seed)
    drawn = import_module("gauntlet").random_match
    return lambda: drawn(chance)


def _phases(longest: int, seed: int) -> Rule:
    """Draft nothing for random times, sometimes all requests together, and then something for random times."""
    asked: Counter[int] = Counter()
    spans: dict[str, tuple[random.Random, list[bool]]] = {}

    def is_off(name: str, step: int) -> bool:
        chance, span = spans.setdefault(name, (random.Random(f"{seed} {name}"), []))
        while len(span) <= step:
            span += [chance.random() < 0.4] * chance.randint(1, 9)
        return span[step]

    def length(handle: int) -> int:
        asked[handle] += 1
        step = asked[handle]
        is_zero = is_off("all", step) or is_off(f"request {handle}", step)
        return 0 if is_zero else random.Random(f"{seed} {handle} {step}").randint(1, longest)

    return length


def stop_of(spec: dict[str, Any] | None) -> Stop:
    """Return a fixed stop rule, or one with random thresholds for each step and sometimes none."""
    if spec is None:
        return lambda: None
    if "rule" in spec:
        rule = StopRule(*spec["rule"])
        return lambda: rule
    chance = random.Random(spec["seed"])

    def draw() -> StopRule | None:
        def some(low: float, high: float) -> list[float]:
            return [chance.uniform(low, high) for _ in range(chance.randint(1, 6))]

        return None if chance.random() < 0.2 else StopRule(some(0.5, 2), some(-1, 1), some(0, 0.8), some(0, 0.8))

    return draw


def split_of(spec: dict[str, Any] | None) -> Callable[[], int] | None:
    """Return splits for each step, drawn from `of` and each kept for a while; None: as leases say."""
    if spec is None:
        return None
    chance = random.Random(spec["seed"])
    row: list[int] = []

    def draw() -> int:
        if not row:
            row.extend([chance.choice(spec["of"])] * chance.randint(1, spec["longest"]))
        return row.pop()

    return draw


def prune_of(spec: dict[str, Any] | None) -> Prunes:
    """Return a random cut for each step, behind one of `layers` at one of `thresholds`, and sometimes none."""
    if spec is None:
        return lambda: None
    chance = random.Random(spec["seed"])

    def draw() -> Prune | None:
        return (
            None if chance.random() < 0.1 else Prune(chance.choice(spec["layers"]), chance.choice(spec["thresholds"]))
        )

    return draw


@contextmanager
def spoiled(control: str, runner: Any) -> Iterator[None]:
    """Break one thing on purpose: a test that does not notice is no test."""
    from vllm.v1.sample import rejection_sampler

    takes_all = (seeded_step, "draw_while_right", lambda _logits, _keys, drafts, *_: drafts.long())
    changes: dict[str, tuple[Any, str, Any]] = {
        "": (ragged, "MODEL_METHODS", ragged.MODEL_METHODS),
        "uniform": (runner.drafter, "is_ragged", False),
        "positions": (ragged, "advance_positions", _forget_to_advance),
        "drawn": (ragged, "sample_draft", _judge_by_the_drawn_token(ragged.sample_draft)),
        "no catch-up": (CatchUp, "_held_until", lambda _catch_up, step, rows: step.firsts[rows]),
        "shifted states": (CatchUp, "keep", _keep_shifted(CatchUp.keep)),
        "failure": (ragged, "advance_positions", _fail),
        "rows": (ragged._Store, "put", _shifted(ragged._Store.put)),
        "probabilities": (ragged, "keep_draft_probabilities", _roll(ragged.keep_draft_probabilities)),
        "shifted target": (TargetStates, "keep", _keep_target_shifted(TargetStates.keep)),
        "noise by step": (seeded_step, "stream_keys", _keys_by_step(seeded_step.stream_keys)),
        "drafts as draws": takes_all,
        "failing draws": (seeded_step, "stream_keys", _fail),
        "acceptance": (rejection_sampler, "rejection_sample", _accept_all(rejection_sampler.rejection_sample)),
    }
    chosen = [changes[control]] + ([takes_all] if control == "acceptance" else [])
    whole = [getattr(owner, name) for owner, name, _ in chosen]
    for owner, name, broken in chosen:
        setattr(owner, name, broken)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(chosen, whole, strict=True):
            setattr(owner, name, value)


@contextmanager
def late_leases(spec: dict[str, Any]) -> Iterator[None]:
    """Let a lease arrive between drafting and verification whose lengths depend on the tokens just drawn.

    `late`: "offered" leaves it to FASER what becomes of them; "obeyed" cuts by them at once, which is biased.
    """
    if "late" not in spec:
        yield
        return
    from faser.engine_adapter.scheduler import SteeredScheduler

    latest, whole = spec["longest"], SteeredScheduler.update_draft_token_ids
    order = Steering.order

    def offer(steering: Steering, lengths: dict[int, int]) -> None:
        action = ActionSet(
            steering.hello.boot_id, 1, next(SEQUENCE), 1 << 40, 1e12, latest, list(lengths), list(lengths.values())
        )
        assert steering.lease.offer(action, steering.step, time.monotonic()) is None

    def ordered(steering: Steering, *rest: Any) -> StepOrder:
        if steering.lease.in_force(steering.step + 1, time.monotonic()) is None:
            offer(steering, {})
        return order(steering, *rest)

    def update(scheduler: Any, drafts: Any) -> None:
        entries = scheduler.steering.entries
        lengths = {
            entries[name].handle: latest if not tokens or tokens[0] % 2 else 0
            for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
            if name in entries
        }
        offer(scheduler.steering, lengths)
        if spec["late"] == "obeyed":
            for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
                del tokens[lengths.get(entries[name].handle, 0) if name in entries else 0 :]
        whole(scheduler, drafts)

    SteeredScheduler.update_draft_token_ids, Steering.order = update, ordered  # type: ignore[method-assign]
    try:
        yield
    finally:
        SteeredScheduler.update_draft_token_ids, Steering.order = whole, order  # type: ignore[method-assign]


def _keys_by_step(keys: Any) -> Any:
    count = itertools.count()
    return lambda seeds, positions: keys(seeds, positions * 0 + next(count))


def _forget_to_advance(drafter: Any, positions: Any, metadata: Any, size: int, padded: int) -> Any:
    kept = positions.clone()
    drafter._update_positions_dependent_metadata(positions, metadata, size, padded, drafter.block_size)
    drafter.positions[:size] = kept
    return drafter.positions[:size]


def _fail(*_: Any) -> Any:
    raise RuntimeError("broken on purpose")


def _shifted(put: Any) -> Any:
    return lambda store, rows, *rest: put(store, rows[1:] + rows[:1], *rest)


def _roll(keep: Any) -> Any:
    return lambda drafter, values: keep(drafter, None if values is None else values.roll(1, 1))


def _judge_by_the_drawn_token(sample: Any) -> Any:
    def drawn(drafter: Any, hidden: Any, sampling: Any) -> Any:
        tokens, probabilities = sample(drafter, hidden, sampling)
        drafter.book._columns[-1] = probabilities.gather(1, tokens[:, None].long())[:, 0]
        return tokens, probabilities

    return drawn


def _keep_shifted(keep: Any) -> Any:
    return lambda catch_up, slots, tokens, hidden: keep(catch_up, slots, tokens, hidden.roll(1, 0))


def _keep_target_shifted(keep: Any) -> Any:
    return lambda states, slots, parts: keep(states, slots, [part.roll(1, 0) for part in parts])


def _accept_all(sample: Any) -> Any:
    def accept(drafts: Any, counts: Any, *rest: Any, **named: Any) -> Any:
        output, start = sample(drafts, counts, *rest, **named), 0
        for row, count in enumerate(counts):
            output[row, :count] = drafts[start : start + count]
            start += count
        return output

    return accept


def told(logprobs: Any) -> list[dict[int, float]]:
    """Return the log probabilities told with each token, by token id; empty: none were asked for."""
    return [{token: chance.logprob for token, chance in each.items()} for each in logprobs or ()]


def under_grammar(params: Any, grammar: dict[str, Any] | None) -> Any:
    """Return a copy of vLLM's SamplingParams that allows only what a grammar does."""
    from vllm.sampling_params import StructuredOutputsParams

    bound = params.clone()
    bound.structured_outputs = None if grammar is None else StructuredOutputsParams(**grammar)
    return bound


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    """Return, for each batch of requests, their tokens and one log entry per step."""
    named: dict[str, Any] = {}
    driver = None
    if scenario["is_steered"]:
        driver = Driver()
        named = {
            "scheduler_cls": "faser.engine_adapter.scheduler.FaserScheduler",
            "worker_cls": "faser.engine_adapter.worker.FaserWorker",
        }
    if scenario.get("has_worker"):  # the runner's mixin without speculation
        named = {"worker_cls": "faser.engine_adapter.worker.FaserWorker"}
    if not scenario.get("is_mended", True):
        from faser.engine_adapter import worker

        worker.mend_expand = lambda: False
    if "process" in scenario:
        import_module("remote_faults").install(scenario["process"])
    coins = None
    if "exits" in scenario:
        coins = import_module("coin_heads")
        coins.install(scenario["exits"]["layers"], scenario["exits"]["kind"])
    from vllm import LLM, SamplingParams

    llm = LLM(scenario["model"], **named, **scenario["engine"])
    executor: Any = llm.llm_engine.model_executor
    runner = executor.driver_worker.worker.model_runner
    batches = []
    for batch in scenario["batches"]:
        params: Any = SamplingParams(**({"ignore_eos": True, "detokenize": False} | batch["sampling"]))
        if "samplings" in batch:  # what is different for each prompt
            given = [batch["sampling"] | each for each in batch["samplings"]]
            params = [SamplingParams(**({"ignore_eos": True, "detokenize": False} | each)) for each in given]
        if "grammars" in batch:  # one for each prompt, null for none
            each = params if isinstance(params, list) else itertools.repeat(params)
            params = [under_grammar(one, grammar) for one, grammar in zip(each, batch["grammars"], strict=False)]
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        if driver is None:
            done, log = llm.generate(prompts, params, use_tqdm=False), []
        else:
            driver.rule, driver.log, driver.runner = rule_of(batch["rule"]), [], runner
            driver.stop, driver.prune = stop_of(batch.get("stop")), prune_of(batch.get("prune"))
            driver.match = match_of(batch.get("copies"))
            driver.split = split_of(batch.get("splits"))
            driver.frontier, driver.is_leased = batch.get("frontier", 0), "leased" in batch["rule"]
            aborted: Any = nullcontext()
            if "process" in scenario:
                faults = import_module("remote_faults")
                faults.begin(runner, batch, batches)
                aborted = faults.aborted(llm, batch.get("abort_at", {}))
            whole = [] if coins is None else coins.spoil(batch.get("broken_cut", ""))
            if coins is not None:
                llm.reset_prefix_cache()  # a broken cut leaves broken blocks
            with spoiled(batch.get("control", ""), runner), late_leases(batch["rule"]), aborted:
                done = llm.generate(prompts, params, use_tqdm=False)
            if coins is not None:
                coins.mend(whole)
            log = driver.log
        tokens = [[list(output.token_ids) for output in request.outputs] for request in done]
        chances = [[told(output.logprobs) for output in request.outputs] for request in done]
        compared = list(import_module("remote_faults").COMPARED) if "process" in scenario else []
        batches.append({"tokens": tokens, "steps": log, "compared": compared, "chances": chances})
    drafter = getattr(runner, "drafter", None)
    return {
        "batches": batches,
        "drafter": type(drafter).__name__,
        "is_ragged": getattr(drafter, "is_ragged", None),
        "faults": dict(getattr(runner, "faults", {})),
        "gate": getattr(getattr(runner, "gate", None), "told", []),
        "is_pruning": getattr(getattr(runner, "pruning", None), "is_on", None),
    }


def write_result(given: dict[str, Any]) -> None:
    """Run a scenario, and write what happened to the file named in it."""
    file = Path(given["result"])
    sidecar: Any = nullcontext()
    if given.get("is_killed"):
        sidecar = import_module("killed_sidecar").KilledSidecar(os.environ["FASER_ENDPOINT"], file.parent)
    with sidecar:
        file.write_text(json.dumps(run(given)))
