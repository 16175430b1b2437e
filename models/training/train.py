"""Training of the learned policy: PPO on many simulated engines at once, judged on unseen ones.

`faser train --config models/weights/policy.recipe.toml`; called by controller/cli/training.py. stable-baselines3 does
the learning, in the environment of models/training/advised.py; it begins with no advice, which is the price policy
itself. Checkpoints (models/training/checkpoint.py) are for resuming; what is released is models/learned/network.py's
format.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import VecEnv

from ..evaluation.evaluate import Decide
from ..evaluation.worlds import K_MAX
from ..learned.network import GLOBAL_INPUTS, Manifest, save_network
from .advised import advised_batch, judged_advice, looks
from .checkpoint import TrainingProgress, load_checkpoint, save_checkpoint
from .config import TrainConfig
from .torch_network import SetPolicy, to_network

Progress: TypeAlias = Callable[[str, int, int], None]  # what, done, of


class _Judge(BaseCallback):
    """Judges now and then, keeps the best, writes checkpoints, stops early.

    A resumed run goes on from the standing that its checkpoint held: its best policy, and the patience that is left.
    """

    def __init__(
        self, config: TrainConfig, batch: VecEnv, folder: Path, progress: Progress | None, standing: TrainingProgress
    ) -> None:
        super().__init__()
        self.config, self.batch, self.folder, self.tell = config, batch, folder, progress
        self.standing = standing

    def _on_training_start(self) -> None:
        if not self.standing.history:
            self.consider()

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
        score = judged_advice(self.batch, to_network(policy.actor, _manifest(self.config)))
        standing.steps = self.model.num_timesteps
        standing.history.append(score)
        self.logger.record("judge/worth_over_price", score)
        standing.since = 0 if score > standing.best + 1e-4 else standing.since + 1
        if score > standing.best:
            standing.best = score
            standing.best_weights = {name: value.clone() for name, value in policy.actor.state_dict().items()}
        save_checkpoint(self.folder, policy, standing, self.config)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run gave."""

    manifest: Path
    first: float  # judgement before it learnt anything: 0, as no advice is
    best: float  # mean worth on unseen engines over that of price, in its tokens
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
    batch = advised_batch(config, decide)
    try:
        return _trained(config, batch, folder, started, resume, progress, commit)
    finally:
        with contextlib.suppress(BrokenPipeError, EOFError):  # a process ended before: that error is the one to tell
            batch.close()


def _trained(
    config: TrainConfig, batch: VecEnv, folder: Path, started: float, resume: bool, progress: Progress | None,
    commit: str,
) -> Trained:  # fmt: skip
    set_random_seed(config.seed)  # not PPO's own seed, which would reseed the engines as well
    model = PPO(
        SetPolicy, batch, n_steps=config.rollout_steps, batch_size=config.minibatch, n_epochs=config.epochs,
        learning_rate=config.learning_rate, gamma=math.exp(-config.discount), gae_lambda=config.trace_decay,
        clip_range=config.clip, ent_coef=config.entropy, device="cpu", tensorboard_log=str(folder / "tensorboard"),
        policy_kwargs={"hidden": config.hidden},
    )  # fmt: skip
    assert isinstance(model.policy, SetPolicy)
    standing = TrainingProgress()
    if resume:
        standing = load_checkpoint(folder, model.policy, config)
    else:
        model.policy.actor.silence()
    low, high = looks(batch)
    judge = _Judge(config, batch, folder, progress, standing)
    model.num_timesteps = standing.steps
    if (left := config.total_steps - standing.steps) > 0:
        model.learn(left, callback=judge, reset_num_timesteps=False, tb_log_name="ppo")
    else:
        judge.init_callback(model)
        model.set_logger(configure(None, []))
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
    return Manifest(config.hidden, K_MAX, "", {}, {}, (-9.0,) * GLOBAL_INPUTS, (9.0,) * GLOBAL_INPUTS)
