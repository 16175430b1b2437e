"""Exit heads for tests, installed in an engine's process by gauntlet.py and engine_child.py, and broken cuts.

`install` puts them where trained heads would be loaded; CONTROLS breaks one thing each: a test that does not notice
is no test. Imported by path, as the scripts that use it have no package.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from faser.engine_adapter import hello as engine_facts
from faser.engine_adapter.gate import Gate
from faser.engine_adapter.pruning import forward as pruning
from faser.engine_adapter.pruning import runner as runner_pruning
from faser.engine_adapter.pruning.cut import Cut
from faser.engine_adapter.pruning.exit_file import ExitFacts
from faser.engine_adapter.pruning.verdict import TokenHeads


class CoinHeads(TokenHeads):
    """Heads that toss a coin for every draft token: `threshold` is the share of failing checks."""

    candidates = 0

    def __init__(self, layers: list[int]) -> None:
        self.layers = tuple(layers)
        self.seen = 0
        self._chance = random.Random(5)

    def passes(self, layer: int, threshold: float, checks: Any) -> Any:
        """Return one coin per token; the states must be there and finite."""
        assert layer in self.layers
        assert checks.states.isfinite().all()
        self.seen += len(checks.tokens)
        return np.array([self._chance.random() >= threshold for _ in range(len(checks.tokens))], dtype=bool)


class ParityHeads(CoinHeads):
    """Heads that look at the drafted token's own value, which a biased rule would show in the output."""

    def passes(self, layer: int, threshold: float, checks: Any) -> Any:
        """Let even tokens pass."""
        return checks.tokens.numpy() % 2 == 0


class OpenGate(Gate):
    """Lets every step prune, and counts what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, bool, float, int]] = []

    def ask(self, requests: int) -> bool:
        """Say yes."""
        return True

    def note(self, requests: int, has_pruned: bool, time_s: float, tokens: int) -> None:
        """Keep it."""
        self.told.append((requests, has_pruned, time_s, tokens))


def install(layers: list[int], kind: str = "coin") -> None:
    """Let this process's engine have heads behind `layers`."""
    heads = {"coin": CoinHeads, "parity": ParityHeads}[kind]
    runner_pruning.Gate = OpenGate  # type: ignore[misc]
    runner_pruning.load_heads = lambda path, model: heads(layers)  # type: ignore[assignment,return-value]
    assert callable(engine_facts.usable_exits)
    facts = ExitFacts(tuple(layers), 0, 0, 0, 0)
    engine_facts.usable_exits = lambda path, config: (facts, None)


def _reads_unwritten(whole: Any, index: Any, cut: Cut, positions: Any) -> Any:
    return _common(whole, index, cut, positions).replace(seq_lens=whole.seq_lens[: len(cut.drafts)].clone())


def _writes_first_slots(whole: Any, index: Any, cut: Cut, positions: Any) -> Any:
    return _common(whole, index, cut, positions).replace(slot_mapping=whole.slot_mapping[: len(index)])


def _shifts_logits(pruned: Any, call: Any, logits: Any, metadata: Any) -> Any:
    return _sample(pruned, call, logits if pruned.cut is None else logits.roll(1, 0), metadata)


def _old_positions(pruned: Any, _layer: Any, arguments: tuple[Any, ...]) -> Any:
    return None if pruned.cut is None else (arguments[0][: len(arguments[1])], *arguments[1:])


def _shifts_auxiliary(pruned: Any, output: Any) -> Any:
    spread = _spread(pruned, output)
    if pruned.cut is None:
        return spread
    hidden, auxiliary = spread
    return hidden, [state.roll(1, 0) for state in auxiliary]


def _fails(*_: Any) -> Any:
    raise RuntimeError("broken on purpose")


def _tests_less(cut: Cut, batch: Any, kept: Any) -> None:
    _init(cut, batch, kept)
    cut.tests[:] = kept - 1
    *_, tested, _, _, targets = batch.memory
    _, tests, _ = batch.kernel.lay_out(batch.lengths, cut.drafts, cut.removed, cut.tests, *batch.memory[2:])
    cut.tested, cut.targets = tested[:tests], targets[:tests]


_common, _sample, _init = pruning.cut_common, pruning.Pruning.sample, Cut.__init__
_spread = pruning.Pruning.spread
CONTROLS: dict[str, list[tuple[Any, str, Any]]] = {
    "": [],
    "seq_lens": [(pruning, "cut_common", _reads_unwritten)],
    "slots": [(pruning, "cut_common", _writes_first_slots)],
    "bonus": [(pruning, "forget_bonus", lambda *_: None)],
    "logits": [(pruning.Pruning, "sample", _shifts_logits)],
    "positions": [(pruning.Pruning, "_pass_on", _old_positions)],
    "auxiliary": [(pruning.Pruning, "spread", _shifts_auxiliary)],  # outputs stay right, drafts do not
    "failure": [(pruning, "cut_attention", _fails)],
    # The naive rule: the failing token loses its own test, and a bonus token is sampled in its place.
    "naive": [
        (Cut, "__init__", _tests_less),
        (Cut, "has_bonus", property(lambda cut: cut.kept > 0)),
    ],
}


def spoil(control: str) -> list[tuple[Any, str, Any]]:
    """Break the cut and return what would mend it."""
    whole = [(owner, name, getattr(owner, name)) for owner, name, _ in CONTROLS[control]]
    for owner, name, broken in CONTROLS[control]:
        setattr(owner, name, broken)
    return whole


def mend(whole: list[tuple[Any, str, Any]]) -> None:
    """Undo `spoil`."""
    for owner, name, value in whole:
        setattr(owner, name, value)
