"""Engines on the real V2 runner whose target is cut at random; each job of jobs.py, with rows that leave.

Heads draw chances at random, or look at the token's own value, and the number of rows that go on is drawn too; or it
is the host's own choice. CONTROLS break one thing each: a test that does not notice is no test.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import jobs
import replayed_graphs

from faser.engine_adapter import hello
from faser.engine_adapter.gate import Gate
from faser.engine_adapter.patches.pruning_graphs import ShortInputs
from faser.engine_adapter.protocol import Prune
from faser.engine_adapter.pruning import forward_v2, runner_v2
from faser.engine_adapter.pruning import halves as halves_module
from faser.engine_adapter.pruning.exit_file import ExitFacts
from faser.engine_adapter.pruning.exit_heads import FEATURES, ExitHeads
from faser.engine_adapter.pruning.head_math import Head
from faser.engine_adapter.pruning.row_budget import RowBudget
from faser.engine_adapter.pruning.verdict import TokenHeads

CHANCE = random.Random(5)
CANDIDATES = 3


class RandomHeads(TokenHeads):
    """Heads that draw each chance; the states must be there and finite."""

    candidates = 0

    def __init__(self, layers: list[int]) -> None:
        self.layers = tuple(layers)

    def passes(self, layer: int, threshold: float, checks: Any) -> Any:
        """Not asked on V2."""
        raise NotImplementedError

    def chances(self, layer: int, threshold: float, checks: Any) -> Any:
        """Draw a chance for every token."""
        import torch

        assert checks.states.isfinite().all()
        return torch.tensor([CHANCE.random() for _ in range(len(checks.tokens))], device=checks.states.device)


class ParityOfTokens(RandomHeads):
    """Heads that look at the drafted token's own value, which a biased rule would show in the output."""

    def chances(self, layer: int, threshold: float, checks: Any) -> Any:
        """Let even tokens pass."""
        return 1.0 - 0.99 * (checks.tokens % 2).float()


class ScoringHeads(ExitHeads):
    """Heads as they are trained, but of random weights; the drafter's likeliest token must be the one it drafted."""

    @classmethod
    def of(cls, layers: list[int], model: Any) -> ScoringHeads:
        """Make them for a target."""
        import torch

        draw, lm_head = torch.Generator().manual_seed(3), model.lm_head.weight
        hidden = lm_head.shape[1]

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, generator=draw)

        heads = {
            layer: Head(
                1.0 + 0.1 * normal(hidden), normal(2, hidden) / hidden, normal(hidden, 2), normal(hidden) / 5,
                normal(hidden) / hidden, normal(len(FEATURES) + 1) / 3,
            )
            for layer in layers
        }  # fmt: skip
        return cls(heads, lm_head, CANDIDATES)

    def chances(self, layer: int, threshold: float, checks: Any) -> Any:
        """Score the tokens."""
        assert (checks.candidates[:, 0] == checks.tokens).all()
        assert ((checks.confidences > 0.0) & (checks.confidences <= 1.0)).all()
        return super().chances(layer, threshold, checks)


class GateThatIsOpen(Gate):
    """Lets every step prune, and keeps what it is told."""

    told: ClassVar[list[list[Any]]] = []

    def ask(self, requests: int) -> bool:
        """Say yes."""
        return True

    def note(self, requests: int, has_used: bool, time_s: float, tokens: int) -> None:
        """Keep it."""
        self.told.append([requests, has_used, time_s, tokens])


def _random_budget(budget: RowBudget, rows: int, drafts: int, threshold: float) -> int | None:
    return CHANCE.randrange(drafts + 1) if CHANCE.random() < 0.8 else None


def install(layers: list[int], kind: str, has_random_budget: bool) -> None:
    """Let this process's engine have heads behind `layers`."""
    os.environ["FASER_EXIT_HEADS"] = kind
    drawn = {"random": RandomHeads, "parity": ParityOfTokens}.get(kind)
    facts = ExitFacts(tuple(layers), 0, 0, 0, 0 if drawn else CANDIDATES)

    def load(path: str, model: Any) -> TokenHeads:
        return ScoringHeads.of(layers, model) if drawn is None else drawn(layers)

    if has_random_budget:
        RowBudget.draft_rows = _random_budget  # type: ignore[method-assign]
    runner_v2.Gate = GateThatIsOpen  # type: ignore[misc]
    runner_v2.load_heads = load  # type: ignore[assignment]
    runner_v2.read_facts = lambda path: facts
    hello.usable_exits = lambda path, config: (facts, None)


def _raise(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken on purpose")


def _reads_unwritten(runner: Any, step: Any, names: Any, short: Any) -> None:
    _attention(runner, step, names, _changed(short, left=short.left * 0))


def _writes_first_slots(runner: Any, step: Any, names: Any, short: Any) -> None:
    _attention(runner, _changed(step, slots=step.slots.roll(1, 1)), names, short)


def _changed(whole: Any, **fields: Any) -> Any:
    from dataclasses import replace

    return replace(whole, **fields)


def _neighbours_states(states: Any, index: Any, rows: int) -> Any:
    return _over_all(states.roll(1, 0) if states.shape[0] != rows else states, index, rows)


def _old_positions(pruning: Any, _layer: Any, arguments: tuple[Any, ...]) -> Any:
    step = pruning._step
    return None if step is None or step.plan is None else (arguments[0][: len(arguments[1])], *arguments[1:])


_attention, _over_all = forward_v2.shorter_attention, forward_v2._over_all
_write, _replay_second = ShortInputs.write, halves_module.Halves.replay_second


def _half_reads_neighbours(inputs: Any, step: Any, short: Any, desc: Any, hidden: Any, residual: Any) -> None:
    _write(inputs, step, short, desc, hidden.roll(1, 0), residual)


def _half_reads_unwritten(inputs: Any, step: Any, short: Any, *rest: Any) -> None:
    _write(inputs, step, _changed(short, left=short.left * 0), *rest)


def _half_is_elsewhere(inputs: Any, step: Any, short: Any, *rest: Any) -> None:
    _write(inputs, step, _changed(short, positions=short.positions * 0), *rest)


def _half_writes_elsewhere(inputs: Any, *given: Any) -> None:
    _write(inputs, *given)
    inputs._slots.copy_(inputs._slots.roll(1, 1))


def _half_leaves_elsewhere(halves: Any, desc: Any, shape: Any, short: Any) -> None:
    _replay_second(halves, desc, shape, short)
    halves._states[: desc.num_tokens].copy_(halves._states[: desc.num_tokens].roll(1, 0))


Break = tuple[Any, str, Any]
CONTROLS: dict[str, list[Break]] = {
    "": [],
    "seq_lens": [(forward_v2, "shorter_attention", _reads_unwritten)],
    "slots": [(forward_v2, "shorter_attention", _writes_first_slots)],
    "bonus": [(forward_v2, "capped", lambda sampled, most: sampled)],
    "states": [(forward_v2, "_over_all", _neighbours_states)],
    "positions": [(forward_v2.PruningV2, "_pass_on", _old_positions)],
    "half's states": [(ShortInputs, "write", _half_reads_neighbours)],
    "half's seq_lens": [(ShortInputs, "write", _half_reads_unwritten)],
    "half's positions": [(ShortInputs, "write", _half_is_elsewhere)],
    "half's slots": [(ShortInputs, "write", _half_writes_elsewhere)],
    "half's outputs": [(halves_module.Halves, "replay_second", _half_leaves_elsewhere)],
    "half's bonus": [(forward_v2, "capped", lambda sampled, most: sampled)],
    "failing half": [(ShortInputs, "write", _raise)],
    "failing second half": [(halves_module.Halves, "_shape", _raise)],
    "failing capture": [(halves_module, "second_half", _raise)],
    "failing attention": [(forward_v2, "shorter_attention", _raise)],
    "failing choice": [(forward_v2, "_chooser", _raise)],
    "failing layout": [(forward_v2.DraftLayout, "of", _raise)],
    "failing notes": [(forward_v2.CutNotes, "__init__", _raise)],
}


def pruned(given: dict[str, Any]) -> dict[str, Any]:
    """Do the job `job` of jobs.py while rows leave.

    :param given: a scenario, and `exits`: layers, thresholds, kind, break, is_own_budget
    """
    exits = given["exits"]
    layers: list[int] = exits["layers"]
    install(layers, exits.get("kind", "random"), not exits.get("is_own_budget"))
    for owner, name, broken in CONTROLS[exits.get("break", "")]:
        setattr(owner, name, broken)
    steers: list[Any] = []
    _prune_at_random(layers, exits["thresholds"], steers)
    job: Callable[[dict[str, Any]], dict[str, Any]] = getattr(jobs, exits.get("job", "generate"))
    engines: list[Any] = []
    seen: dict[str, Any] = {}
    halves: Counter[str] = Counter()
    if "graphs" in given:
        os.environ.update(given.get("environment", {}))
        replayed_graphs.install(**given["graphs"])
        _count_halves(halves)
    started = jobs.Engine.__init__

    def start(engine: jobs.Engine, settings: dict[str, Any]) -> None:
        if (graphs := given.get("graphs")) is not None:
            with_graphs = {"enforce_eager": False, "compilation_config": {"mode": 0}}
            settings = settings | {"engine": settings.get("engine", {}) | with_graphs}
        started(engine, settings)
        engines.append(engine)
        if graphs is not None:
            engine.runner.capture_model()
            seen.update((name, replayed_graphs.watched(each)) for name, each in replayed_graphs.managers(engine.runner))

    jobs.Engine.__init__ = start  # type: ignore[method-assign]
    result = job(given)
    pruning = engines[0].runner.pruning
    told = {"pruned": steers, "gate": GateThatIsOpen.told, "seen": seen, "halves": halves}
    told["shared_builders"] = 0 if pruning is None else _shared_builders(engines[0].runner, pruning)
    return result | told | {"is_pruning": pruning is not None and pruning.is_on}


def prune_at_random(layers: list[int], thresholds: list[float]) -> list[Any]:
    """Let the engines of this process cut at random behind `layers`; return a list of what the reports will say."""
    install(layers, "random", has_random_budget=True)
    noted: list[Any] = []
    _prune_at_random(layers, thresholds, noted)
    return noted


def _shared_builders(runner: Any, pruning: Any) -> int:
    """Return how many builders of attention's metadata are vLLM's own behind a cut: they keep what was built."""

    def builders(groups: Any) -> set[int]:
        return {id(builder) for each in groups for group in each for builder in group.metadata_builders}

    own = [builders(groups) for groups in pruning._behind.values()]
    assert all(own)
    return len(set().union(*own) & builders(runner.attn_groups))


def _count_halves(counts: Counter[str]) -> None:
    """Count the steps that replay two halves, and the sizes of the second one's shapes."""
    inherited = halves_module.Halves.replay_second

    def replay_second(halves: Any, desc: Any, shape: Any, short: Any) -> None:
        counts["all"] += 1
        counts["shorter"] += shape.num_tokens < desc.num_tokens
        counts["padded"] += shape.num_tokens > len(short.rows)
        inherited(halves, desc, shape, short)

    halves_module.Halves.replay_second = replay_second  # type: ignore[method-assign]


def _prune_at_random(layers: list[int], thresholds: list[float], noted: list[Any]) -> None:
    """Let each lease ask for a cut somewhere, and note what the reports say."""
    from faser.engine_adapter.steering.steering import Steering

    order, record = jobs.Steer.__init__, jobs.Steer.note
    chance = random.Random(4)
    asked: list[Prune | None] = [None]  # of the step before: the rule of a lease holds one step late

    def made(steer: Any, *given: Any, **named: Any) -> None:
        order(steer, *given, **named)
        ordered = Steering.order

        def with_prune(steering: Steering, *rest: Any) -> Any:
            found = ordered(steering, *rest)
            found.prune, asked[0] = asked[0], Prune(chance.choice(layers), chance.choice(thresholds))
            return found

        Steering.order = with_prune  # type: ignore[method-assign]

    def note(steer: Any, steering: Any, given: Any, outcome: Any) -> None:
        record(steer, steering, given, outcome)
        report = outcome.report
        if report is not None and report.prune_layer is not None:
            rows = [
                [
                    len(outcome.drafts.get(name, ())),
                    report.pruned[row] if report.pruned else 0,
                    outcome.sampled.counts[row] if outcome.sampled.counts else 0,
                    bool(report.is_last_accepted[row]) if report.is_last_accepted else False,
                    outcome.scheduled[name],
                ]
                for name, row in outcome.row_of.items()
                if name in outcome.scheduled
            ]
            noted.append({"layer": report.prune_layer, "saved": report.saved_rows, "s": report.prune_s, "rows": rows})

    jobs.Steer.__init__, jobs.Steer.note = made, note  # type: ignore[method-assign]


def save_deep(given: dict[str, Any]) -> str:
    """Write a target or drafter of six layers, of the family that is asked for."""
    sys.path.append(str(Path(__file__).parents[1] / "patches"))
    tiny_model: Any = import_module("test_pruning").tiny_model
    return str(tiny_model(Path(given["folder"]), given["noise"], given.get("family", "Llama")))
