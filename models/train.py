"""Training of the learned policy: imitate price, then PPO on many simulated engines at once, judged on unseen ones.

`faser train --config models/weights/policy.recipe.toml`; called by controller/train.py. stable-baselines3 does the
learning; time between decisions is unequal, so advantages are those of a semi-Markov process (env/reward.py).
Checkpoints are tensors alone (no pickled code), for resuming; what is released is models/network.py's format.
"""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from ..env.acceptance import Floats
from ..env.observation import observe_vector
from ..env.reward import advantages
from ..env.simulator import Simulator
from ..env.spaces import Action
from ..env.state import EngineState
from ..env.world import NAMED, PRICED
from .evaluate import Decide
from .learned import outside_of
from .network import GLOBAL_INPUTS, OUTPUTS, REQUEST_INPUTS, Head, Manifest, Singles, save_network
from .policy import Policy, PolicyError
from .price import PricePolicy
from .simulated import SimulatedEngine
from .torch_network import DeepSets, SetPolicy, live, to_network
from .worlds import K_MAX, WorldSpec, training, training_scenario

Progress: TypeAlias = Callable[[str, int, int], None]  # what, done, of
UNSEEN = 7_000_000  # added to the seed: worlds for early stopping, neither trained in nor held out for the table
RATE_MEMORY_S = 40.0  # of an engine's mean tokens per second, in steps of a full batch
VALIDATION_ENGINES, VALIDATION_STEPS = 24, 250


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One training run. Every field can stand in the TOML file."""

    head: Head = "price"  # price: thresholds for all; lengths: one for each request
    seed: int = 0
    hidden: int = 32
    worlds: int = 48  # random engines to train in
    exits_share: float = 0.0  # of these, have exit heads, and prune
    slots: int = 64  # most requests in a batch
    imitation_steps: int = 12_000  # decisions of the price policy to learn from before; 0: from nothing
    imitation_epochs: int = 12
    engines: int = 32  # simulated at once
    rollout_steps: int = 64
    total_steps: int = 400_000  # engine steps of PPO; 0: imitation alone
    renewed_share: float = 0.1  # of the engines, replaced by others before each rollout
    learning_rate: float = 3e-4
    epochs: int = 4
    minibatch: int = 512
    discount: float = 0.1  # per step of a full batch without speculation
    trace_decay: float = 0.9
    entropy: float = 0.0
    clip: float = 0.15
    judge_every: int = 8  # rollouts
    patience: int = 8  # judgements without a better one, then it stops

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[float, float]] = {
            "hidden": (4, 256), "worlds": (1, 1024), "slots": (1, 256), "engines": (1, 4096),
            "rollout_steps": (2, 4096), "minibatch": (2, 65536), "epochs": (1, 100), "judge_every": (1, 10**6),
            "patience": (1, 10**6),
            "renewed_share": (0.0, 1.0), "exits_share": (0.0, 1.0), "learning_rate": (1e-7, 1.0),
            "imitation_steps": (0, 10**8),
            "total_steps": (0, 10**10), "discount": (0.0, 10.0), "trace_decay": (0.0, 1.0), "clip": (0.01, 1.0),
        }  # fmt: skip
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not math.isfinite(value) or not low <= value <= high:
                raise PolicyError(f"{name} {value}; expected {low:g}..{high:g}")
        if self.head not in ("price", "lengths"):
            raise PolicyError(f"head {self.head!r}; expected price or lengths")


def load_config(path: Path) -> TrainConfig:
    """Read a TOML file; raise PolicyError for unknown keys and for values that cannot be."""
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read ({error.strerror}); expected a TOML file") from None
    except ValueError as error:
        raise PolicyError(f"{path}: {error}; expected TOML") from None
    known = {field.name: field for field in fields(TrainConfig)}
    for name, value in found.items():
        if name not in known:
            raise PolicyError(f"{path}: unknown key {name}; expected {', '.join(known)}")
        kind = type(known[name].default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise PolicyError(f"{path}: {name} is {type(value).__name__}, expected {kind.__name__}")
    return TrainConfig(**found)


# --- the environment, as stable-baselines3 takes it ---


class EngineBatch(VecEnv):
    """Many engines that never end: before each rollout some are replaced, and values carry over its last step.

    Reward of a step: (tokens - rate * seconds) / tokens of a step without drafts, rate the engine's own mean. Summed,
    it is what a policy gains over its mean rate, whatever the engine's speed.
    """

    def __init__(self, config: TrainConfig, seed: int) -> None:
        self.config = config
        scenario = training_scenario(config.worlds, seed, config.slots, config.exits_share)
        self.k_max = scenario.positions
        self.simulator = Simulator(
            scenario, config.engines, mode=PRICED if config.head == "price" else NAMED, seed=seed
        )
        bounded = {"requests": (config.slots, REQUEST_INPUTS), "globals": (GLOBAL_INPUTS,)}
        observation = spaces.Dict({name: spaces.Box(-1.0, 1.0, shape) for name, shape in bounded.items()})
        action: spaces.Space[Any] = (
            spaces.Box(-1.0, 1.0, (len(OUTPUTS),))
            if config.head == "price"
            else spaces.MultiDiscrete([self.k_max + 1] * config.slots)
        )
        super().__init__(config.engines, observation, action)
        self._random = np.random.default_rng([seed, 1])
        self._actions: np.ndarray[Any, Any] = np.zeros(0)
        self.rate: Floats = np.zeros(config.engines)
        self.paces: Floats = np.ones(config.engines)  # seconds of the last step, in steps of a full batch

    def reset(self) -> dict[str, Singles]:
        """Begin with new engines."""
        self.simulator.reset()
        self._settle(np.arange(self.num_envs))
        return self.observe()

    def renew(self) -> dict[str, Singles]:
        """Replace some engines by others."""
        chosen = np.flatnonzero(self._random.random(self.num_envs) < self.config.renewed_share)
        if len(chosen):
            self.simulator.reset(chosen)
            self._settle(chosen)
        return self.observe()

    def _settle(self, engines: np.ndarray[Any, Any]) -> None:
        self.simulator.warm(engines)
        state = self.simulator.state.engines[engines]
        self.rate[engines] = np.maximum(state["emitted"], 1) / (state["step_s"] + state["host_s"])

    def observe(self) -> dict[str, Singles]:
        """Return copies: the simulator writes into its arrays."""
        return {
            "requests": np.ascontiguousarray(self.simulator.requests()),
            "globals": self.simulator.state.globals.copy(),
        }

    def step_async(self, actions: np.ndarray[Any, Any]) -> None:
        """Note the actions."""
        self._actions = actions

    def step_wait(self) -> tuple[dict[str, Singles], Singles, np.ndarray[Any, Any], list[dict[str, Any]]]:
        """Step every engine."""
        if self.config.head == "price":
            self.simulator.step(outside_of(self._actions.astype(np.float32)))
        else:
            self.simulator.step(None, self._actions.astype(np.int8))
        engines, terms = self.simulator.state.engines, self.simulator.state.terms
        seconds = engines["step_s"] + engines["host_s"]
        tokens = terms[:, 1]
        pace_s = self.simulator.origins.pace_s[engines["profile"]]
        self.paces = seconds / pace_s
        rewards = (tokens - self.rate * seconds) / np.maximum(engines["decode_tokens"], 1.0)
        keep = np.exp(-self.paces / RATE_MEMORY_S)
        self.rate = self.rate * keep + (1.0 - keep) * tokens / np.maximum(seconds, 1e-9)
        rewards = np.where(engines["decode_tokens"] > 0, np.clip(rewards, -10.0, 10.0), 0.0)
        return self.observe(), rewards.astype(np.float32), np.zeros(self.num_envs, bool), [{} for _ in tokens]

    def close(self) -> None:
        """End the simulator's threads."""
        self.simulator.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute, once for each engine."""
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the batch."""
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        """Call a method of the batch."""
        return [getattr(self, method_name)(*args, **kwargs)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Nothing is wrapped."""
        return [False] * self.num_envs


class SemiMarkovBuffer(DictRolloutBuffer):
    """A rollout whose steps last unequal times."""

    engines: EngineBatch

    def reset(self) -> None:
        """Empty it."""
        super().reset()
        self.paces = np.zeros((self.buffer_size, self.n_envs))

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Take in a step, and how long it took."""
        self.paces[self.pos] = self.engines.paces
        super().add(*args, **kwargs)

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: np.ndarray[Any, Any]) -> None:
        """Fill in advantages and returns."""
        values = self.values.astype(np.float64)
        following = np.concatenate([values[1:], last_values.detach().numpy().reshape(1, -1)])
        config = self.engines.config
        ends = np.zeros(values.shape, bool)
        self.advantages = advantages(
            self.rewards.astype(np.float64), values, following, self.paces, ends, config.discount, config.trace_decay
        ).astype(np.float32)
        self.returns = self.advantages + self.values


# --- imitation ---


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


# --- reinforcement ---


def judged(actor: DeepSets, config: TrainConfig) -> float:
    """Return the mean log of tokens per busy second on unseen engines, greedily; the same engines every time."""
    judge = EngineBatch(replace(config, engines=VALIDATION_ENGINES, worlds=VALIDATION_ENGINES), config.seed + UNSEEN)
    seen = judge.reset()
    tokens, seconds = np.zeros((2, VALIDATION_ENGINES))
    for step in range(VALIDATION_STEPS):
        with torch.no_grad():
            output = actor(torch.from_numpy(seen["requests"]), torch.from_numpy(seen["globals"])).numpy()
        judge.step_async(output if config.head == "price" else output.argmax(axis=-1))
        seen = judge.step_wait()[0]
        if step >= VALIDATION_STEPS // 4:
            engines = judge.simulator.state.engines
            tokens += judge.simulator.state.terms[:, 1]
            seconds += engines["step_s"] + engines["host_s"]
    judge.close()
    return float(np.log(np.maximum(tokens, 1.0) / np.maximum(seconds, 1e-9)).mean())


class _Judge(BaseCallback):
    """Renews engines, judges now and then, keeps the best, writes checkpoints, stops early."""

    def __init__(self, config: TrainConfig, batch: EngineBatch, folder: Path, progress: Progress | None) -> None:
        super().__init__()
        self.config, self.batch, self.folder, self.tell = config, batch, folder, progress
        self.best, self.best_state, self.since, self.rollouts = -math.inf, {}, 0, 0  # type: ignore[var-annotated]
        self.history: list[float] = []

    def _on_training_start(self) -> None:
        self.consider()

    def _on_rollout_start(self) -> None:
        self.model._last_obs = self.batch.renew()

    def _on_step(self) -> bool:
        return self.since < self.config.patience

    def _on_rollout_end(self) -> None:
        self.rollouts += 1
        if self.tell is not None:
            self.tell("training", min(self.num_timesteps, self.config.total_steps), self.config.total_steps)
        if self.rollouts % self.config.judge_every == 0:
            self.consider()

    def consider(self) -> None:
        """Judge the actor as it is."""
        policy = self.model.policy
        assert isinstance(policy, SetPolicy)
        score = judged(policy.actor, self.config)
        self.history.append(score)
        self.logger.record("judge/log_tokens_per_s", score)
        self.since = 0 if score > self.best + 1e-4 else self.since + 1
        if score > self.best:
            self.best = score
            self.best_state = {name: value.clone() for name, value in policy.actor.state_dict().items()}
        save_checkpoint(self.model, self.folder, self.num_timesteps)  # type: ignore[arg-type]


def save_checkpoint(model: PPO, folder: Path, steps: int) -> None:
    """Write the state of training, tensors and numbers alone."""
    path = folder / "checkpoint.pt"
    state = {"policy": model.policy.state_dict(), "optimizer": model.policy.optimizer.state_dict(), "steps": steps}
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def load_checkpoint(model: PPO, folder: Path) -> int:
    """Go on from a checkpoint; return the steps it had made."""
    try:
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
        model.policy.load_state_dict(state["policy"])
        model.policy.optimizer.load_state_dict(state["optimizer"])
        return int(state["steps"])
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PolicyError(
            f"{folder / 'checkpoint.pt'}: {reason}; expected a checkpoint of this configuration"
        ) from None


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run gave."""

    manifest: Path
    first: float  # mean log tokens/s on unseen engines before reinforcement
    best: float
    steps: int
    seconds: float


def train(
    config: TrainConfig, folder: Path, decide: Decide, *, resume: bool = False, progress: Progress | None = None,
    commit: str = "",
) -> Trained:  # fmt: skip
    """Train, and write policy.safetensors and policy.json into `folder`."""
    started = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    folder.mkdir(parents=True, exist_ok=True)
    batch = EngineBatch(config, config.seed)
    model = PPO(
        SetPolicy, batch, n_steps=config.rollout_steps, batch_size=config.minibatch, n_epochs=config.epochs,
        learning_rate=config.learning_rate, clip_range=config.clip, ent_coef=config.entropy, seed=config.seed,
        rollout_buffer_class=SemiMarkovBuffer, device="cpu", tensorboard_log=str(folder / "tensorboard"),
        policy_kwargs={"head": config.head, "hidden": config.hidden, "k_max": batch.k_max},
    )  # fmt: skip
    assert isinstance(model.rollout_buffer, SemiMarkovBuffer)
    assert isinstance(model.policy, SetPolicy)
    model.rollout_buffer.engines = batch
    done = 0
    if resume:
        done = load_checkpoint(model, folder)
    elif config.imitation_steps:
        lessons = collect(config, decide, progress)
        imitate(model.policy.actor, lessons, config, progress)
    low, high = _range(batch)
    judge = _Judge(config, batch, folder, progress)
    model.num_timesteps = done
    if config.total_steps > done:
        model.learn(config.total_steps - done, callback=judge, reset_num_timesteps=False, tb_log_name="ppo")
    else:
        judge.init_callback(model)
        model.set_logger(_quiet())
        judge.consider()
    actor = model.policy.actor
    actor.load_state_dict(judge.best_state)
    about: dict[str, object] = {
        "config": asdict(config),
        "commit": commit,
        "steps": model.num_timesteps,
        "seconds": round(time.monotonic() - started, 1),
        "judgements": [round(score, 5) for score in judge.history],
    }
    manifest = Manifest(config.head, config.hidden, K_MAX, "", about, {}, low, high)
    save_network(to_network(actor, manifest), folder, "policy")
    batch.close()
    seconds = time.monotonic() - started
    return Trained(folder / "policy.json", judge.history[0], judge.best, int(model.num_timesteps), seconds)


def _quiet() -> Any:
    from stable_baselines3.common.logger import configure

    return configure(None, [])


def _range(batch: EngineBatch) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return what the global features span in training, under lengths of all kinds."""
    random = np.random.default_rng([batch.config.seed, 4])
    low, high = np.full((2, GLOBAL_INPUTS), np.nan, np.float32)
    batch.reset()
    for values in _random_actions(batch, random, 200):
        batch.step_async(values)
        seen = batch.step_wait()[0]["globals"]
        low, high = np.fmin(low, seen.min(axis=0)), np.fmax(high, seen.max(axis=0))
    batch.reset()
    return tuple(map(float, low)), tuple(map(float, high))


def _random_actions(batch: EngineBatch, random: np.random.Generator, steps: int) -> Iterable[np.ndarray[Any, Any]]:
    for step in range(steps):
        if step % 10 == 0:
            held = random.random(batch.num_envs)
        if batch.config.head == "lengths":
            yield (held * (batch.k_max + 1)).astype(np.int64)[:, None].repeat(batch.config.slots, axis=1)
        else:
            neutral = np.full((batch.num_envs, len(OUTPUTS)), -1.0, np.float32)
            neutral[:, 1] = 2.0 * held - 1.0
            yield neutral
