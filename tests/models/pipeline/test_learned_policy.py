"""The learned pipeline policy: files are checked before use, numpy says what torch says, training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from faser.env.pipeline.arrivals import draw_arrivals
from faser.env.pipeline.constants import PipelineConstants
from faser.env.pipeline.pipeline_actions import ACTION_SIZES
from faser.env.pipeline.view import PIPELINE_FEATURES
from faser.models.pipeline.judge import serve_load
from faser.models.pipeline.learned_policy import (
    PipelineNetwork,
    layer_shapes,
    load_pipeline_network,
    save_pipeline_network,
)
from faser.models.pipeline.names import make_pipeline_policy
from faser.models.pipeline.pipeline_policy import LoadHint
from faser.models.pipeline.train_pipeline import (
    HELD_OUT,
    TRAINING_LOADS,
    PipelineProgress,
    examples,
    imitate,
    load_progress,
    network_of,
    new_model,
    save_progress,
)
from faser.models.policies.policy import PolicyError

BROKEN = ("sha256", "features", "action_sizes", "hidden", "manifest_version", "missing", "text")


def network(hidden: int = 8) -> PipelineNetwork:
    random, tensors = np.random.default_rng(0), {}
    for name, shape in layer_shapes(hidden).items():
        tensors[f"{name}.weight"] = random.normal(size=shape).astype(np.float32)
        tensors[f"{name}.bias"] = random.normal(size=shape[1]).astype(np.float32)
    return PipelineNetwork(hidden, tensors, {"seed": 0})


def test_a_saved_network_decides_as_before_and_serves(tmp_path: Path) -> None:
    saved = network()
    save_pipeline_network(saved, tmp_path / "pipeline.json")
    loaded = load_pipeline_network(tmp_path / "pipeline.json")
    observation = np.random.default_rng(1).random(len(PIPELINE_FEATURES)).astype(np.float32)
    assert (loaded.scores(observation) == saved.scores(observation)).all()
    assert loaded.training == {"seed": 0}
    arrivals = draw_arrivals("gamma-2", 0, 60.0)
    constants = PipelineConstants()
    policy = make_pipeline_policy(f"learned:{tmp_path / 'pipeline.json'}", constants, arrivals, 0)
    assert serve_load(policy, arrivals, LoadHint.of(arrivals), constants, 0)[0].is_done


@pytest.mark.parametrize(
    "broken", ["sha256", "features", "action_sizes", "hidden", "manifest_version", "missing", "text"]
)
def test_files_that_are_not_whole_are_refused_in_one_line(broken: str, tmp_path: Path) -> None:
    manifest = tmp_path / "pipeline.json"
    save_pipeline_network(network(), manifest)
    fields = json.loads(manifest.read_text())
    if broken == "missing":
        manifest.with_suffix(".safetensors").unlink()
    elif broken == "text":
        manifest.write_text("{")
    else:
        fields[broken] = {"sha256": "0" * 64, "hidden": 0}.get(broken, [])
        manifest.write_text(json.dumps(fields))
    with pytest.raises(PolicyError) as raised:
        load_pipeline_network(manifest)
    assert "\n" not in str(raised.value)


def test_numpy_says_what_torch_says() -> None:
    model = new_model(0)
    observations = np.random.default_rng(2).random((20, len(PIPELINE_FEATURES))).astype(np.float32)
    actions, _ = model.predict(observations, deterministic=True)
    own = network_of(model)
    ends = np.cumsum(ACTION_SIZES)[:-1]
    mine = [[int(part.argmax()) for part in np.split(own.scores(row), ends)] for row in observations]
    assert (np.array(mine) == actions).all()


def test_training_never_sees_what_is_held_out_and_learns_to_imitate() -> None:
    assert not set(HELD_OUT) & set(TRAINING_LOADS)
    model = new_model(0)
    observations, actions = examples(1, 1)
    assert observations.shape == (300, len(PIPELINE_FEATURES))
    before = model.policy.evaluate_actions(torch.as_tensor(observations), torch.as_tensor(actions))[1].mean().item()
    imitate(model, observations, actions, epochs=5)
    after = model.policy.evaluate_actions(torch.as_tensor(observations), torch.as_tensor(actions))[1].mean().item()
    assert after > before


def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path) -> None:
    model = new_model(0)
    save_progress(tmp_path, model, PipelineProgress(10, 2.5, 0.4, [0.5, 0.4]))
    other = new_model(1)
    progress = load_progress(tmp_path, other)
    assert (progress.steps, progress.seconds, progress.best, progress.history) == (10, 2.5, 0.4, [0.5, 0.4])
    for name, value in model.policy.state_dict().items():
        assert torch.equal(value, other.policy.state_dict()[name])
