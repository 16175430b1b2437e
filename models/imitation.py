"""The first lessons of a learned policy: what price did, in the learner's words, and a fit to it.

Called by models/train.py before reinforcement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ..env.acceptance import Floats
from ..env.observation import observe_vector
from ..env.spaces import Action
from ..env.state import EngineState
from .evaluate import Decide
from .network import Singles
from .policy import Policy
from .price import PricePolicy
from .simulated import SimulatedEngine
from .torch_network import DeepSets, live
from .train_config import TrainConfig
from .worlds import WorldSpec, training

Progress: TypeAlias = Callable[[str, int, int], None]  # what, done, of


@dataclass(frozen=True, slots=True)
class Lessons:
    """What the teacher saw and did: (n, slots, features), (n, features), (n, outputs) or (n, slots) lengths."""

    requests: Singles
    overall: Singles
    targets: Singles


class Teacher:
    """The price policy, with its answers noted in the learner's words."""

    def __init__(self, policy: Policy, config: TrainConfig) -> None:
        self.name = policy.name
        self._policy, self._config = policy, config
        self.seen: list[tuple[Singles, Singles, Singles]] = []

    def act(self, state: EngineState) -> Action:
        """Return the teacher's action."""
        action = self._policy.act(state)
        decoding = state.decoding()
        if decoding.any() and "probing" not in action.reason:
            view = observe_vector(state, self._config.slots)
            if self._config.head == "price":
                target = in_words(action, state.acceptance()[decoding].cumprod(axis=1), action.lengths[decoding])
            else:
                target = np.zeros(self._config.slots, np.float32)
                place = {handle: at for at, handle in enumerate(state.requests.column("handle").tolist())}
                target[: len(view.handles)] = [action.lengths[place[handle]] for handle in view.handles.tolist()]
            self.seen.append((view.requests, view.globals, target))
        return action


def in_words(action: Action, survival: Floats, lengths: np.ndarray[Any, Any]) -> Singles:
    """Return the price head's outputs, (len(OUTPUTS),) in -1..1, that stand for an action; survival (n, k_max)."""
    k_max = survival.shape[1]
    deepest = int(lengths.max(initial=0))
    if deepest == 0:
        return np.array([1.0, -1.0, -1.0, -1.0], np.float32)
    depth = 2.0 * deepest / k_max - 1.0
    if action.stop is not None:
        going = action.stop.go_on[: max(deepest - 1, 1)]
        return np.array([-1.0, depth, 2.0 * action.stop.keep[0] - 1.0, 2.0 * float(np.mean(going)) - 1.0], np.float32)
    taken = np.arange(k_max) < lengths[:, None]
    left = ~taken & (np.arange(k_max) < deepest)
    least = float(survival[taken].min())
    most = float(survival[left].max()) if left.any() else 0.0
    threshold = 0.5 * (least + min(most, least))
    return np.array([2.0 * threshold - 1.0, depth, -1.0, -1.0], np.float32)


def collect(config: TrainConfig, decide: Decide, progress: Progress | None = None) -> Lessons:
    """Let price drive engines of the training worlds at all loads."""
    random = np.random.default_rng([config.seed, 2])
    profiles = training(config.worlds, config.seed, config.exits_share)
    seen: list[tuple[Singles, Singles, Singles]] = []
    while len(seen) < config.imitation_steps:
        profile = profiles[int(random.integers(len(profiles)))]
        world = WorldSpec(profile.name, "training", profile, has_confidence=config.head == "price")
        requests = min(int(2.0 ** random.uniform(0.0, math.log2(config.slots) + 0.5)), config.slots)
        scenario = world.closed(requests) if random.random() < 0.7 else world.drifting(config.slots)
        engine = SimulatedEngine(scenario, int(random.integers(1 << 31)), has_confidence=world.has_confidence)
        teacher = Teacher(PricePolicy(engine.capabilities, use_confidence=world.has_confidence), config)
        state, actions = EngineState(engine.capabilities), None
        for sequence in range(1, 301):
            actions = decide(state, engine.step(actions), teacher, sequence)
        seen += teacher.seen[20:]
        if progress is not None:
            progress("watching price", min(len(seen), config.imitation_steps), config.imitation_steps)
    return Lessons(*(np.stack(column) for column in zip(*seen, strict=True)))


def imitate(actor: DeepSets, lessons: Lessons, config: TrainConfig, progress: Progress | None = None) -> float:
    """Fit the actor to the teacher; return the loss of the last epoch on a tenth that was left out."""
    random = np.random.default_rng([config.seed, 3])
    order = random.permutation(len(lessons.targets))
    held, taught = order[: len(order) // 10], order[len(order) // 10 :]
    optimizer = torch.optim.Adam(actor.parameters(), lr=2e-3)
    tensors = [torch.from_numpy(array) for array in (lessons.requests, lessons.overall, lessons.targets)]
    rounds = config.imitation_epochs
    for epoch in range(rounds):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1.0 - epoch / rounds)
        for batch in np.array_split(random.permutation(taught), max(len(taught) // 256, 1)):
            loss = _imitation_loss(actor, [tensor[batch] for tensor in tensors])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if progress is not None:
            progress("imitating price", epoch + 1, rounds)
    with torch.no_grad():
        return float(_imitation_loss(actor, [tensor[held] for tensor in tensors]))


def _imitation_loss(actor: DeepSets, batch: list[torch.Tensor]) -> torch.Tensor:
    requests, overall, targets = batch
    output = actor(requests, overall)
    if actor.kind == "price":
        return torch.square(output - targets).mean()
    mask = live(requests)
    losses = torch.nn.functional.cross_entropy(output.transpose(1, 2), targets.long(), reduction="none")
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)
