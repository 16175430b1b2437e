"""Train a pipeline policy: imitation of `weigh`, then PPO. `python -m faser.models.pipeline.train_pipeline FOLDER`.

Each call goes on for `--minutes` from the folder's checkpoint (safetensors; Adam's moments begin anew) and writes
pipeline.json and pipeline.safetensors of the best policy so far, judged on seeds of its own. Loads of the shipped
traces azure-code, azure-conv and mooncake are held out: training never sees them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from ...engine_adapter.arrays import Ints, Singles
from ...env.pipeline.arrivals import draw_arrivals
from ...env.pipeline.cluster import STAY, Cluster
from ...env.pipeline.constants import STAGES, PipelineConstants
from ...env.pipeline.pipeline_actions import ACTION_SIZES, action_of, move_of
from ...env.pipeline.pipeline_serving import PipelineServingEnv
from .judge import ANOTHER_DAY, serve_load
from .learned_policy import LearnedPipeline, PipelineNetwork, save_pipeline_network
from .pipeline_policy import LoadHint, toward
from .weigh import Weigh

TRAINING_LOADS: Final = ("servegen", "swell", "gamma-1", "gamma-2", "gamma-4", "gamma-8")
HELD_OUT: Final = ("azure-code", "azure-code-own-clock", "azure-conv", "mooncake")
HIDDEN: Final = 64
EPISODE_S: Final = 300.0
REWARD_SCALE: Final = 0.05  # a second's cost of a few tens becomes about one
ASTRAY: Final = 0.15  # of the imitated seconds, a random move is made: the rule shows the way back
JUDGED_SEEDS: Final = (9001, 9002)
STEPS: Final = 256  # of one environment between two updates


class ScaledServing(PipelineServingEnv):
    """The environment with rewards of about one."""

    def step(self, action: Ints) -> tuple[Singles, float, bool, bool, dict[str, Any]]:
        """Scale the reward."""
        observation, reward, ended, truncated, info = super().step(action)
        return observation, REWARD_SCALE * reward, ended, truncated, info


@dataclass(slots=True)
class PipelineProgress:
    """How far a training is."""

    steps: int = 0
    seconds: float = 0.0
    best: float = float("inf")  # cost per request on seeds of its own
    history: list[float] = field(default_factory=list)


def examples(episodes: int, seed: int) -> tuple[Singles, Ints]:
    """Return (n, features) observations and (n, 3) actions that lead to what `weigh` holds best."""
    random, constants = np.random.default_rng(seed), PipelineConstants()
    seen, wanted = [], []
    for episode in range(episodes):
        load = TRAINING_LOADS[episode % len(TRAINING_LOADS)]
        arrivals = draw_arrivals(load, seed + episode, EPISODE_S)
        rule = Weigh(constants)
        rule.start(LoadHint.of(draw_arrivals(load, seed + episode + ANOTHER_DAY, EPISODE_S)))
        stages = int(random.choice(STAGES))
        cluster = Cluster(arrivals, (stages, int(random.integers(1, 1 + min(6, 64 // stages)))), constants, episode)
        while cluster.now_s < EPISODE_S:
            view = cluster.view()
            rule.decide(view)  # learns, and sets its target
            move = STAY if any(view.coming) else toward(view, *rule.target)
            seen.append(view.vector())
            wanted.append(action_of(move))
            if random.random() < ASTRAY and not any(view.coming):
                move = move_of(random.integers(0, ACTION_SIZES))
            cluster.apply(move)
            cluster.advance(cluster.now_s + constants.decision_s)
    return np.array(seen), np.array(wanted)


def imitate(model: PPO, observations: Singles, actions: Ints, epochs: int = 30) -> float:
    """Fit the actor to examples; return the share of moves that it then makes as shown."""
    inputs, labels = torch.as_tensor(observations), torch.as_tensor(actions)
    is_move = (labels[:, 1] != ACTION_SIZES[1] // 2).float()
    weight = 1.0 + is_move * float((1 - is_move).sum() / is_move.sum().clamp(min=1)) ** 0.5
    optimizer, random = torch.optim.Adam(model.policy.parameters(), 1e-3), np.random.default_rng(0)
    for _ in range(epochs):
        for part in np.array_split(random.permutation(len(inputs)), len(inputs) // 512 + 1):
            _, log_likelihood, _ = model.policy.evaluate_actions(inputs[part], labels[part])
            loss = -(log_likelihood * weight[part]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    network = network_of(model)
    agreed = [(action_of(network.move(row)) == label).all() for row, label in zip(observations, actions, strict=True)]
    return float(np.mean(agreed))


def network_of(model: PPO, training: dict[str, Any] | None = None) -> PipelineNetwork:
    """Return the actor as arrays."""
    state = model.policy.state_dict()
    names = {"hidden_1": "mlp_extractor.policy_net.0", "hidden_2": "mlp_extractor.policy_net.2", "head": "action_net"}
    tensors = {}
    for name, source in names.items():
        tensors[f"{name}.weight"] = np.ascontiguousarray(state[f"{source}.weight"].numpy().T, np.float32)
        tensors[f"{name}.bias"] = state[f"{source}.bias"].numpy().astype(np.float32)
    return PipelineNetwork(HIDDEN, tensors, training or {})


def judged(network: PipelineNetwork) -> float:
    """Return the mean cost per request over the training loads, on seeds that training does not use."""
    constants, costs = PipelineConstants(), []
    for load in TRAINING_LOADS:
        for seed in JUDGED_SEEDS:
            arrivals = draw_arrivals(load, seed, EPISODE_S)
            hint = LoadHint.of(draw_arrivals(load, seed + ANOTHER_DAY, EPISODE_S))
            cluster, _ = serve_load(LearnedPipeline(network, constants), arrivals, hint, constants, seed)
            totals = cluster.totals
            costs.append(constants.cost(totals.missed, totals.gpu_s, totals.moved_bytes) / len(arrivals))
    return float(np.mean(costs))


def new_model(seed: int) -> PPO:
    """Return an untrained model on four environments."""
    torch.set_num_threads(1)
    batch = DummyVecEnv([lambda: ScaledServing(TRAINING_LOADS, EPISODE_S) for _ in range(4)])
    return PPO(
        "MlpPolicy", batch, learning_rate=1e-4, n_steps=STEPS, batch_size=256, n_epochs=4, gamma=0.99, clip_range=0.1,
        target_kl=0.02, ent_coef=0.0, seed=seed, device="cpu",
        policy_kwargs={"net_arch": {"pi": [HIDDEN, HIDDEN], "vf": [HIDDEN, HIDDEN]}},
    )  # fmt: skip


def save_progress(folder: Path, model: PPO, progress: PipelineProgress) -> None:
    """Replace the folder's checkpoint."""
    facts = {"steps": progress.steps, "seconds": progress.seconds, "best": progress.best, "history": progress.history}
    part = folder / "checkpoint.part"
    save_file(dict(model.policy.state_dict()), part, {"faser": json.dumps(facts)})
    part.replace(folder / "checkpoint.safetensors")


def load_progress(folder: Path, model: PPO) -> PipelineProgress:
    """Put the checkpoint's weights into the model."""
    with safe_open(folder / "checkpoint.safetensors", "pt") as file:
        facts = json.loads((file.metadata() or {})["faser"])
        model.policy.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return PipelineProgress(**facts)


def train(folder: Path, minutes: float, seed: int, episodes: int = 72) -> PipelineProgress:
    """Begin or go on; return how far it is."""
    begun_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    model = new_model(seed)
    if (folder / "checkpoint.safetensors").exists():
        progress = load_progress(folder, model)
    else:
        progress = PipelineProgress()
        agreed = imitate(model, *examples(episodes, 20_000 + 1000 * seed))
        sys.stdout.write(f"imitation: {agreed:.1%} of the seconds as shown\n")
        _judge(folder, model, progress, seed)
    spent_s = progress.seconds
    while time.monotonic() - begun_s < 60.0 * minutes:
        model.learn(20 * STEPS * 4, reset_num_timesteps=False)
        progress.steps += 20 * STEPS * 4
        progress.seconds = spent_s + time.monotonic() - begun_s
        _judge(folder, model, progress, seed)
    return progress


def _judge(folder: Path, model: PPO, progress: PipelineProgress, seed: int) -> None:
    """Judge the actor, keep it where it is the best so far, and write the checkpoint."""
    facts = {
        "command": "python -m faser.models.pipeline.train_pipeline FOLDER", "seed": seed, "steps": progress.steps,
        "seconds": round(progress.seconds, 1), "loads": list(TRAINING_LOADS), "held_out": list(HELD_OUT),
    }  # fmt: skip
    network = network_of(model, facts)
    cost = judged(network)
    progress.history.append(cost)
    if cost < progress.best:
        progress.best = cost
        save_pipeline_network(network, folder / "pipeline.json")
    save_progress(folder, model, progress)
    sys.stdout.write(f"{progress.steps} steps, {progress.seconds:.0f} s: cost per request {cost:.4f}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Parse and train."""
    parser = argparse.ArgumentParser(
        prog="python -m faser.models.pipeline.train_pipeline", description="Train a pipeline policy."
    )
    parser.add_argument("folder", type=Path, help="where checkpoint and policy lie")
    parser.add_argument("--minutes", type=float, default=4.0, help="of this call; the next one goes on")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    train(options.folder, options.minutes, options.seed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
