"""Training: configurations, the torch policy, checkpoints, what a run leaves and how it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("stable_baselines3")

import torch
from gymnasium import spaces
from safetensors.torch import save_file
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from faser.controller.cli.evaluate import decided
from faser.controller.cli.main import app
from faser.controller.errors import FaserError
from faser.env.layout.observation import GLOBAL_FEATURES, REQUEST_FEATURES
from faser.env.profile.match_model import fault_of
from faser.env.spaces import Capabilities
from faser.env.speculative_serving import observation_space
from faser.models.evaluation.evaluate import Decide
from faser.models.evaluation.worlds import LONGEST_COPY, training
from faser.models.learned.network import OUTPUTS, load_network
from faser.models.policies.policy import PolicyError
from faser.models.registry import make_policy
from faser.models.training import train as training_run
from faser.models.training.advised import AdvisedServing
from faser.models.training.baseline_run import BaselineRun, tasks
from faser.models.training.checkpoint import NAME, TrainingProgress, load_checkpoint, save_checkpoint
from faser.models.training.config import TrainConfig, load_config
from faser.models.training.torch_network import DeepSets, SetPolicy
from faser.models.training.train import train

TINY = TrainConfig(
    worlds=3, slots=8, engines=2, rollout_steps=8, total_steps=48, minibatch=8, judge_every=2, hidden=8, spans=4,
)  # fmt: skip
RECIPE = Path(__file__).parents[3] / "models" / "weights" / "policy.recipe.toml"


def test_the_released_recipe_can_be_read() -> None:
    assert load_config(RECIPE).head == "values"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("heads = 'values'", "unknown key heads"),
        ("head = 'price'", "head 'price'; expected 'values'"),
        ("imitation_steps = 12000", "unknown key imitation_steps"),
        ("engines = 0", "engines 0"),
        ("engines = 'four'", "engines is str"),
        ("learning_rate = nan", "learning_rate nan"),
        ("engines = ", "TOML"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(text: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=r"[^\n]+$") as caught:
        load_config(path)
    assert hint in str(caught.value)
    result = CliRunner().invoke(app, ["train", "--config", str(path)])
    assert isinstance(result.exception, FaserError)


# --- the torch policy ---


def make_actor_critic(slots: int = 8) -> SetPolicy:
    actions = spaces.Box(-1.0, 1.0, (len(OUTPUTS),))
    return SetPolicy(observation_space(slots), actions, lambda _: 1e-3, hidden=8)


def some_requests(live: int, slots: int = 8) -> dict[str, torch.Tensor]:
    """Return an observation, (2, slots, features) and (2, features), in which the first `live` slots hold a request."""
    torch.manual_seed(0)
    requests = torch.rand(2, slots, len(REQUEST_FEATURES))
    requests[..., 0], requests[..., 1] = 1.0, 0.0
    requests[:, live:] = 0.0
    return {"requests": requests, "globals": torch.rand(2, len(GLOBAL_FEATURES))}


def test_log_probabilities_are_those_of_the_actions_that_were_chosen() -> None:
    policy, seen = make_actor_critic(), some_requests(5)
    actions, values, log_prob = policy(seen)
    assert values.shape == (2, 1)
    _, again, entropy = policy.evaluate_actions(seen, actions)
    torch.testing.assert_close(again, log_prob)
    assert (policy.evaluate_actions(seen, actions + 1.0)[1] != log_prob).all()
    assert entropy is not None
    assert torch.isfinite(entropy).all()


def test_slots_without_a_request_mean_nothing() -> None:
    actor, seen = DeepSets(8), some_requests(5)
    padded = torch.cat([seen["requests"], torch.zeros(2, 30, len(REQUEST_FEATURES))], dim=1)
    torch.testing.assert_close(actor(padded, seen["globals"]), actor(seen["requests"], seen["globals"]))


class HowMany(gymnasium.Env[dict[str, np.ndarray], np.ndarray]):
    """One step: earned is how near the first component of the action is to the share of slots with a request."""

    def __init__(self, slots: int = 8) -> None:
        self.observation_space: Any = observation_space(slots)
        self.action_space = spaces.Box(-1.0, 1.0, (len(OUTPUTS),))
        self._slots = slots

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self._live = int(self.np_random.integers(self._slots + 1))
        requests = np.zeros((self._slots, len(REQUEST_FEATURES)), np.float32)
        requests[: self._live, 0] = 1.0
        overall = np.full(len(GLOBAL_FEATURES), self._live / self._slots, np.float32)
        return {"requests": requests, "globals": overall}, {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        earned = 1.0 - abs(float(action[0]) - (2.0 * self._live / self._slots - 1.0))
        return self.reset()[0], earned, True, False, {}


def test_ppo_learns_with_the_policy_over_sets() -> None:
    torch.set_num_threads(1)
    model = PPO(
        SetPolicy, DummyVecEnv([HowMany]), n_steps=256, batch_size=64, n_epochs=8, learning_rate=3e-3, seed=0,
        device="cpu", policy_kwargs={"hidden": 8},
    )  # fmt: skip

    def earned() -> float:
        world, found = HowMany(), []
        seen, _ = world.reset(seed=1)
        for _ in range(200):
            seen, reward, *_ = world.step(model.predict(seen, deterministic=True)[0])
            found.append(reward)
        return float(np.mean(found))

    before = earned()
    model.learn(4096)
    assert before < 0.6
    assert earned() > 0.85


# --- whole runs ---


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in processes of their own are started in test_advised.py."""

    def batch(config: TrainConfig, decide: Decide) -> DummyVecEnv:
        return DummyVecEnv([partial(AdvisedServing, config, decide, number) for number in range(config.engines)])

    monkeypatch.setattr(training_run, "advised_batch", batch)


def test_a_run_leaves_a_policy_that_the_daemon_can_load_and_resumes_where_it_was(tmp_path: Path) -> None:
    first = train(TINY, tmp_path, decided)
    assert first.steps == 48
    network = load_network(first.manifest)
    assert network.manifest.training["config"]["hidden"] == 8  # type: ignore[index]
    make_policy(f"learned:{first.manifest}", Capabilities(k_max=5))
    again = train(replace(TINY, total_steps=80), tmp_path, decided, resume=True)
    assert again.steps == 80
    with pytest.raises(PolicyError, match="expected a checkpoint of this configuration"):
        train(replace(TINY, hidden=16), tmp_path, decided, resume=True)


def scripted(monkeypatch: pytest.MonkeyPatch, *scores: float) -> None:
    """Have judgements find these scores, one after the other."""
    left = iter(scores)
    monkeypatch.setattr(training_run, "judged_advice", lambda batch, network: next(left))


def test_a_resumed_run_keeps_the_best_policy_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, 5.0, 9.0)
    best = load_network(train(TINY, tmp_path, decided).manifest)
    scripted(monkeypatch, 0.5)
    again = train(replace(TINY, total_steps=80), tmp_path, decided, resume=True)
    network = load_network(again.manifest)
    assert (again.first, again.best, again.steps) == (5.0, 9.0, 80)
    assert network.manifest.training["judgements"] == [5.0, 9.0, 0.5]
    assert all((network.tensors[name] == values).all() for name, values in best.tensors.items())


def test_a_resumed_run_has_the_patience_that_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(TINY, patience=2, judge_every=1)
    scripted(monkeypatch, 5.0, 6.0, 4.0, 4.0)
    stopped = train(replace(config, total_steps=32), tmp_path, decided)
    assert stopped.steps == 32
    again = train(replace(config, total_steps=160), tmp_path, decided, resume=True)  # one more judgement is left
    assert again.steps == 48 + config.engines
    assert again.best == 6.0


def test_a_run_that_is_complete_is_written_again_without_another_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 5.0, 9.0)
    first = load_network(train(TINY, tmp_path, decided).manifest)
    again = train(replace(TINY, total_steps=25), tmp_path, decided, resume=True)
    assert load_network(again.manifest).manifest.sha256 == first.manifest.sha256


def test_a_checkpoint_gives_back_weights_moments_and_standing(tmp_path: Path) -> None:
    policy, fresh = make_actor_critic(), make_actor_critic()
    sum(each.square().sum() for each in policy.parameters()).backward()  # type: ignore[union-attr]
    policy.optimizer.step()
    best = {name: torch.randn_like(value) for name, value in policy.actor.state_dict().items()}
    standing = TrainingProgress(640, 10, 3, 7.25, [5.0, 7.25, 7.0], best)
    save_checkpoint(tmp_path, policy, standing, TINY)
    found = load_checkpoint(tmp_path, fresh, replace(TINY, total_steps=10_000))
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    weights = found.best_weights
    assert asdict(replace(found, best_weights={})) == asdict(replace(standing, best_weights={}))
    assert all(torch.equal(weights[name], value) for name, value in best.items())
    for old, new in zip(policy.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(old, new)
        for name, value in policy.optimizer.state[old].items():
            assert torch.equal(fresh.optimizer.state[new][name], value), name


@pytest.mark.parametrize(
    ("harm", "hint"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(b"PK\x03\x04 a zip of pickled code"), "header"),
        (lambda path: save_file({"policy.log_std": torch.zeros(4)}, path), "checkpoint version None"),
    ],
)
def test_a_checkpoint_that_is_none_is_refused_in_one_line(
    harm: Callable[[Path], object], hint: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, make_actor_critic(), TrainingProgress(), TINY)
    harm(tmp_path / NAME)
    with pytest.raises(PolicyError, match=r"^[^\n]+expected a checkpoint of this configuration$") as caught:
        load_checkpoint(tmp_path, make_actor_critic(), TINY)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"seed": 4}, "the run began with seed 0, this configuration has seed 4"),
        ({"learning_rate": 0.01, "worlds": 5}, "began with worlds 3, learning_rate 0.0003, this configuration has w"),
        ({"hidden": 16}, "hidden 8"),
    ],
)
def test_a_run_does_not_go_on_under_another_configuration(changes: dict[str, float], hint: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_actor_critic(), TrainingProgress(), TINY)
    with pytest.raises(PolicyError, match=r"^[^\n]+expected a checkpoint of this configuration$") as caught:
        train(replace(TINY, **changes), tmp_path, decided, resume=True)  # type: ignore[arg-type]
    assert hint in str(caught.value)


def test_a_share_of_the_training_engines_copies() -> None:
    having = [profile.matches for profile in training(60, 0, copies_share=0.5) if profile.matches]
    assert 15 < len(having) < 45
    assert not any(map(fault_of, having))
    assert not any(profile.matches for profile in training(60, 0))
    (task,) = tasks(replace(TINY, copies_share=1.0, worlds=1), TINY.seed, 1)
    assert task.engine().capabilities.copy_max == LONGEST_COPY


def test_a_share_of_the_training_engines_prunes() -> None:
    having = [bool(profile.exits) for profile in training(60, 0, 0.5)]
    assert 15 < sum(having) < 45
    assert not any(profile.exits for profile in training(60, 0))
    plain, pruned = (replace(TINY, exits_share=share, worlds=2) for share in (0.0, 1.0))
    rates = [
        [BaselineRun.of(task, config, decided).token_rate for task in tasks(config, config.seed, 2)]
        for config in (plain, pruned)
    ]
    assert rates[0] != rates[1], "engines that prune serve as those without heads"
