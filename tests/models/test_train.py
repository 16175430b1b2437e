"""Training: configurations, rewards, semi-Markov advantages, checkpoints; and that it learns (slow)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("stable_baselines3")

import torch
from safetensors.torch import save_file

from faser.controller.cli import app
from faser.controller.errors import FaserError
from faser.controller.evaluate import decided
from faser.engine_adapter.protocol import StopRule
from faser.env.action_vector import DEPTH, GO_ON, KEEP, THRESHOLD, lengths_for, meant
from faser.env.spaces import Action, Capabilities
from faser.models import train as training_run
from faser.models.checkpoint import NAME, Standing, load_checkpoint, save_checkpoint
from faser.models.engine_batch import EngineBatch, SemiMarkovBuffer
from faser.models.imitation import collect, imitate, in_words
from faser.models.network import Head, load_network
from faser.models.policy import PolicyError, make_policy
from faser.models.torch_network import DeepSets, SetPolicy
from faser.models.train import judged, train
from faser.models.train_config import TrainConfig, load_config
from faser.models.worlds import training

TINY = TrainConfig(
    worlds=4, slots=8, imitation_steps=120, imitation_epochs=2, engines=4, rollout_steps=16, total_steps=192,
    minibatch=32, judge_every=2, hidden=8,
)  # fmt: skip
RECIPE = Path(__file__).parents[2] / "models" / "weights" / "policy.recipe.toml"


def test_the_released_recipe_can_be_read() -> None:
    assert load_config(RECIPE).head == "advice"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("heads = 'price'", "unknown key heads"),
        ("head = 'magic'", "expected one of price, lengths, advice"),
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


# --- the environment ---


@pytest.mark.parametrize("head", ["price", "lengths"])
def test_observations_lie_in_their_space_and_the_same_seed_gives_the_same_rewards(head: Head) -> None:
    def rewards() -> list[float]:
        batch, found = EngineBatch(replace(TINY, head=head), 3), []
        seen = batch.reset()
        batch.action_space.seed(0)
        for _ in range(40):
            assert batch.observation_space.contains({name: values[0] for name, values in seen.items()})
            batch.step_async(np.stack([batch.action_space.sample() for _ in range(batch.num_envs)]))
            seen, reward, done, _ = batch.step_wait()
            assert not done.any()
            found += reward.tolist()
        return found

    assert rewards() == rewards()


def test_what_is_earned_is_what_is_gained_over_the_own_mean_rate() -> None:
    batch = EngineBatch(replace(TINY, engines=16, worlds=16), 3)
    batch.reset()
    neutral = np.full((16, 4), -1.0, np.float32)
    for _ in range(300):
        batch.step_async(neutral)
        batch.step_wait()
    totals = np.zeros(16)
    for _ in range(200):
        batch.step_async(neutral)
        totals += batch.step_wait()[1]
    assert np.abs(np.median(totals / 200)) < 0.05


def test_advantages_discount_by_time_not_by_steps() -> None:
    config = replace(TINY, engines=1, discount=0.5)
    batch = EngineBatch(config, 0)
    buffer = SemiMarkovBuffer(2, batch.observation_space, batch.action_space, device="cpu", n_envs=1)
    buffer.engines = batch
    seen = batch.reset()
    one = torch.zeros(1)
    for pace, reward in ((1.0, 0.0), (3.0, 1.0)):
        batch.paces = np.array([pace])
        buffer.add(seen, np.zeros((1, 4)), np.array([reward]), np.zeros(1), one, one)
    buffer.compute_returns_and_advantage(torch.tensor([[2.0]]), np.zeros(1))
    last = 1.0 + 2.0 * math.exp(-1.5)
    assert buffer.advantages[1, 0] == pytest.approx(last)
    assert buffer.advantages[0, 0] == pytest.approx(math.exp(-0.5) * config.trace_decay * last)


@pytest.mark.parametrize("head", ["price", "lengths"])
def test_log_probabilities_count_live_requests_alone(head: Head) -> None:
    batch = EngineBatch(replace(TINY, head=head), 1)
    policy = SetPolicy(
        batch.observation_space, batch.action_space, lambda _: 1e-3, head=head, hidden=8, k_max=batch.k_max
    )
    seen = {name: torch.from_numpy(values) for name, values in batch.reset().items()}
    actions, values, log_prob = policy(seen)
    assert values.shape == (4, 1)
    other = actions.clone()
    if head == "lengths":
        other[:, -1] = (other[:, -1] + 1) % (batch.k_max + 1)  # nobody sits in the last slot yet
        assert (seen["requests"][:, -1] == 0).all()
    _, again, entropy = policy.evaluate_actions(seen, other)
    torch.testing.assert_close(again, log_prob)
    assert entropy is not None
    assert torch.isfinite(entropy).all()


# --- imitation ---


def test_a_teachers_lengths_come_back_from_its_words() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        acceptance = random.uniform(0.2, 0.95, (12, 6))
        threshold, depth = float(random.uniform(0.05, 0.8)), int(random.integers(0, 7))
        lengths = np.minimum((acceptance.cumprod(axis=1) >= threshold).sum(axis=1), depth)
        words = in_words(Action(lengths, 0), acceptance.cumprod(axis=1), lengths)
        full = np.concatenate([words, np.full(3, -1.0, np.float32)])
        means = meant(full)
        again = lengths_for(acceptance, float(means[THRESHOLD]), float(means[DEPTH]))
        assert again.tolist() == lengths.tolist()


def test_a_teachers_stop_rule_comes_back_from_its_words() -> None:
    stop = StopRule([1.0] * 6, [0.0] * 6, [0.3] * 6, [0.5, 0.4, 0.0, 0.0, 0.0, 0.0])
    words = in_words(Action(np.full(4, 3), 3, stop=stop), np.full((4, 6), 0.5), np.full(4, 3))
    means = meant(np.concatenate([words, np.full(3, -1.0, np.float32)]))
    assert means[[THRESHOLD, DEPTH, KEEP, GO_ON]].tolist() == pytest.approx([0.0, 0.5, 0.3, 0.45])


@pytest.mark.parametrize("head", ["price", "lengths"])
def test_imitation_comes_nearer_to_the_teacher(head: Head) -> None:
    config = replace(TINY, head=head, imitation_steps=300)
    lessons = collect(config, decided)
    torch.manual_seed(0)
    actor = DeepSets(head, 8, 6)
    first = imitate(actor, lessons, replace(config, imitation_epochs=1))
    assert imitate(actor, lessons, replace(config, imitation_epochs=40)) < 0.9 * first


# --- whole runs ---


def test_a_run_leaves_a_policy_that_the_daemon_can_load_and_resumes_where_it_was(tmp_path: Path) -> None:
    first = train(TINY, tmp_path, decided)
    assert first.steps == 192
    network = load_network(first.manifest)
    assert network.manifest.training["config"]["head"] == "price"  # type: ignore[index]
    make_policy(f"learned:{first.manifest}", Capabilities(k_max=5))
    again = train(replace(TINY, total_steps=320), tmp_path, decided, resume=True)
    assert again.steps == 320
    with pytest.raises(PolicyError, match="expected a checkpoint of this configuration"):
        train(replace(TINY, hidden=16), tmp_path, decided, resume=True)


def scripted(monkeypatch: pytest.MonkeyPatch, *scores: float) -> None:
    """Have judgements find these scores, one after the other."""
    left = iter(scores)
    monkeypatch.setattr(training_run, "judged", lambda actor, config: next(left))


def test_a_resumed_run_keeps_the_best_policy_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, 5.0, 9.0)
    best = load_network(train(TINY, tmp_path, decided).manifest)
    scripted(monkeypatch, 0.5)
    again = train(replace(TINY, total_steps=320), tmp_path, decided, resume=True)
    network = load_network(again.manifest)
    assert (again.first, again.best, again.steps) == (5.0, 9.0, 320)
    assert network.manifest.training["judgements"] == [5.0, 9.0, 0.5]
    assert all((network.tensors[name] == values).all() for name, values in best.tensors.items())


def test_a_resumed_run_has_the_patience_that_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(TINY, patience=2, judge_every=1)
    scripted(monkeypatch, 5.0, 6.0, 4.0, 4.0)
    stopped = train(replace(config, total_steps=128), tmp_path, decided)
    assert stopped.steps == 128
    again = train(replace(config, total_steps=640), tmp_path, decided, resume=True)  # one more judgement is left
    assert again.steps == 192 + config.engines
    assert again.best == 6.0


def test_a_run_that_is_complete_is_written_again_without_another_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 5.0, 9.0)
    first = load_network(train(TINY, tmp_path, decided).manifest)
    again = train(replace(TINY, total_steps=100), tmp_path, decided, resume=True)
    assert load_network(again.manifest).manifest.sha256 == first.manifest.sha256


def make_actor_critic() -> SetPolicy:
    batch = EngineBatch(TINY, 0)
    return SetPolicy(batch.observation_space, batch.action_space, lambda _: 1e-3, head="price", hidden=8, k_max=6)


def test_a_checkpoint_gives_back_weights_moments_and_standing(tmp_path: Path) -> None:
    policy, fresh = make_actor_critic(), make_actor_critic()
    sum(each.square().sum() for each in policy.parameters()).backward()  # type: ignore[union-attr]
    policy.optimizer.step()
    best = {name: torch.randn_like(value) for name, value in policy.actor.state_dict().items()}
    standing = Standing(640, 10, 3, 7.25, [5.0, 7.25, 7.0], best)
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
    save_checkpoint(tmp_path, make_actor_critic(), Standing(), TINY)
    harm(tmp_path / NAME)
    with pytest.raises(PolicyError, match=r"^[^\n]+expected a checkpoint of this configuration$") as caught:
        load_checkpoint(tmp_path, make_actor_critic(), TINY)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"seed": 4}, "the run began with seed 0, this configuration has seed 4"),
        ({"learning_rate": 0.01, "worlds": 5}, "began with worlds 4, learning_rate 0.0003, this configuration has w"),
        ({"hidden": 16}, "hidden 8"),
    ],
)
def test_a_run_does_not_go_on_under_another_configuration(changes: dict[str, float], hint: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_actor_critic(), Standing(), TINY)
    with pytest.raises(PolicyError, match=r"^[^\n]+expected a checkpoint of this configuration$") as caught:
        train(replace(TINY, **changes), tmp_path, decided, resume=True)  # type: ignore[arg-type]
    assert hint in str(caught.value)


def test_a_share_of_the_training_engines_prunes(tmp_path: Path) -> None:
    having = [bool(profile.exits) for profile in training(60, 0, 0.5)]
    assert 15 < sum(having) < 45
    assert not any(profile.exits for profile in training(60, 0))
    plain, pruned = (replace(TINY, exits_share=share, worlds=2, total_steps=64) for share in (0.0, 1.0))
    judgements = [
        load_network(train(config, tmp_path / str(config.exits_share), decided).manifest).manifest.training[
            "judgements"
        ]
        for config in (plain, pruned)
    ]
    assert judgements[0] != judgements[1], "engines that prune serve as those without heads"


@pytest.mark.slow
def test_thirty_seconds_of_learning_from_nothing_gain_tokens_per_second(tmp_path: Path) -> None:
    config = TrainConfig(
        worlds=8, slots=16, imitation_steps=0, engines=32, rollout_steps=32, total_steps=40_000, learning_rate=1e-3,
        judge_every=10, seed=1,
    )  # fmt: skip
    result = train(config, tmp_path, decided)
    assert result.best > result.first + 0.03
    assert judged(DeepSets("price", 32, 6), config) < result.best
