"""Training of the learned policy: PPO on many simulated engines at once, judged on unseen ones.

`faser train --config models/weights/policy.recipe.toml`; called by controller/train.py. stable-baselines3 does the
learning. The advice head begins with none (models/advised.py). The others imitate price first, and learn in the
compiled simulator, where time between decisions is unequal: their advantages are those of a semi-Markov process
(env/reward.py). Checkpoints (models/checkpoint.py) are for resuming; what is released is models/network.py's format.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from .advised import UNSEEN, advised_batch, judged_advice, looks
from .checkpoint import Standing, load_checkpoint, save_checkpoint
from .engine_batch import EngineBatch, SemiMarkovBuffer
from .evaluate import Decide
from .imitation import Progress, collect, imitate
from .network import GLOBAL_INPUTS, OUTPUTS, Manifest, save_network
from .torch_network import DeepSets, SetPolicy, to_network
from .train_config import TrainConfig
from .worlds import K_MAX

VALIDATION_ENGINES, VALIDATION_STEPS = 24, 250


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


@dataclass(frozen=True, slots=True)
class Grounds:
    """Where a head is trained, how it is judged, and what it has seen there."""

    batch: VecEnv
    score: Callable[[DeepSets], float]  # higher is better, comparable within a run
    bounds: Callable[[], tuple[tuple[float, ...], tuple[float, ...]]]  # of the global features
    ppo: dict[str, Any]  # arguments of its own

    @classmethod
    def of(cls, config: TrainConfig, decide: Decide) -> Grounds:
        """Start the engines."""
        if config.head == "advice":
            advised = advised_batch(config, decide)
            return cls(
                advised,
                lambda actor: judged_advice(advised, to_network(actor, _manifest(config))),
                partial(looks, advised),
                {"gamma": math.exp(-config.discount), "gae_lambda": config.trace_decay},
            )
        batch = EngineBatch(config, config.seed)
        return cls(
            batch,
            lambda actor: judged(actor, config),
            partial(_range, batch),
            {"rollout_buffer_class": SemiMarkovBuffer},
        )


class _Judge(BaseCallback):
    """Renews engines, judges now and then, keeps the best, writes checkpoints, stops early.

    A resumed run goes on from the standing that its checkpoint held: its best policy, and the patience that is left.
    """

    def __init__(
        self, config: TrainConfig, grounds: Grounds, folder: Path, progress: Progress | None, standing: Standing
    ) -> None:
        super().__init__()
        self.config, self.grounds, self.folder, self.tell = config, grounds, folder, progress
        self.standing = standing

    def _on_training_start(self) -> None:
        if not self.standing.history:
            self.consider()

    def _on_rollout_start(self) -> None:
        if isinstance(self.grounds.batch, EngineBatch):
            self.model._last_obs = self.grounds.batch.renew()

    def _on_step(self) -> bool:
        return self.standing.since < self.config.patience

    def _on_rollout_end(self) -> None:
        self.standing.rollouts += 1
        if self.tell is not None:
            self.tell("training", min(self.num_timesteps, self.config.total_steps), self.config.total_steps)
        if self.standing.rollouts % self.config.judge_every == 0:
            self.consider()

    def consider(self) -> None:
        """Judge the actor as it is."""
        policy, standing = self.model.policy, self.standing
        assert isinstance(policy, SetPolicy)
        score = self.grounds.score(policy.actor)
        standing.steps = self.model.num_timesteps
        standing.history.append(score)
        self.logger.record("judge/log_tokens_per_s", score)
        standing.since = 0 if score > standing.best + 1e-4 else standing.since + 1
        if score > standing.best:
            standing.best = score
            standing.best_weights = {name: value.clone() for name, value in policy.actor.state_dict().items()}
        save_checkpoint(self.folder, policy, standing, self.config)


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
    grounds = Grounds.of(config, decide)
    try:
        return _trained(config, grounds, folder, decide, started, resume, progress, commit)
    finally:
        with contextlib.suppress(BrokenPipeError, EOFError):  # a process ended before: that error is the one to tell
            grounds.batch.close()


def _trained(
    config: TrainConfig, grounds: Grounds, folder: Path, decide: Decide, started: float, resume: bool,
    progress: Progress | None, commit: str,
) -> Trained:  # fmt: skip
    model = PPO(
        SetPolicy, grounds.batch, n_steps=config.rollout_steps, batch_size=config.minibatch, n_epochs=config.epochs,
        learning_rate=config.learning_rate, clip_range=config.clip, ent_coef=config.entropy, seed=config.seed,
        device="cpu", tensorboard_log=str(folder / "tensorboard"),
        policy_kwargs={"head": config.head, "hidden": config.hidden, "k_max": K_MAX}, **grounds.ppo,
    )  # fmt: skip
    assert isinstance(model.policy, SetPolicy)
    if isinstance(model.rollout_buffer, SemiMarkovBuffer):
        assert isinstance(grounds.batch, EngineBatch)
        model.rollout_buffer.engines = grounds.batch
    standing = Standing()
    if resume:
        standing = load_checkpoint(folder, model.policy, config)
    elif config.head == "advice":
        model.policy.actor.silence()
    elif config.imitation_steps:
        lessons = collect(config, decide, progress)
        imitate(model.policy.actor, lessons, config, progress)
    low, high = grounds.bounds()
    judge = _Judge(config, grounds, folder, progress, standing)
    model.num_timesteps = standing.steps
    if (left := config.total_steps - standing.steps) > 0:
        model.learn(left, callback=judge, reset_num_timesteps=False, tb_log_name="ppo")
    else:
        judge.init_callback(model)
        model.set_logger(_quiet())
        judge._on_training_start()
    actor = model.policy.actor
    actor.load_state_dict(standing.best_weights)
    about: dict[str, object] = {
        "config": asdict(config),
        "commit": commit,
        "steps": model.num_timesteps,
        "seconds": round(time.monotonic() - started, 1),
        "judgements": [round(score, 5) for score in standing.history],
    }
    manifest = replace(_manifest(config), training=about, low=low, high=high)
    save_network(to_network(actor, manifest), folder, "policy")
    seconds = time.monotonic() - started
    return Trained(folder / "policy.json", standing.history[0], standing.best, int(model.num_timesteps), seconds)


def _manifest(config: TrainConfig) -> Manifest:
    """Return a manifest for which nothing is unlike training."""
    return Manifest(config.head, config.hidden, K_MAX, "", {}, {}, (-9.0,) * GLOBAL_INPUTS, (9.0,) * GLOBAL_INPUTS)


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
