"""Which models have layers that can move, and what is read of their checkpoint."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from faser.engine_adapter.patches.pipeline.loading import Decoder, blank, decoder_of, every_layer_built, filled
from faser.engine_adapter.stages.shelf import Checkpoint, ImmovableModelError, mapped_embedding


class Ranged(nn.Module):
    """A decoder that runs a range of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.start_layer, self.end_layer = 0, 3
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: Any) -> Any:
        """Run the range."""
        for layer in self.layers[self.start_layer : self.end_layer]:
            x = layer(x)
        return x


class Whole(Ranged):
    """One that runs them all, whatever its range says."""

    def forward(self, x: Any) -> Any:
        """Run all."""
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    """What vLLM calls: a decoder and a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model, self.lm_head = inner, nn.Linear(2, 4)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A checkpoint in two files, one of which has the end of layer 1."""
    first = {"model.embed_tokens.weight": torch.arange(8.0, dtype=torch.bfloat16).reshape(4, 2)}
    first |= {f"model.layers.{layer}.weight": torch.full((2, 2), float(layer)) for layer in range(3)}
    save_file(first, tmp_path / "a.safetensors")
    save_file({"model.layers.1.bias": torch.ones(2)}, tmp_path / "b.safetensors")
    return [str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]


def decoder() -> Decoder:
    found = decoder_of(Model(Ranged()), layers=3)
    assert found is not None
    return found


def test_a_decoder_that_reads_its_range_is_found() -> None:
    assert decoder().name == "layers"
    assert type(decoder().inner) is Ranged


def test_an_architecture_that_runs_all_its_layers_cannot_move_them() -> None:
    assert decoder_of(Model(Whole()), layers=3) is None
    assert decoder_of(Model(Ranged()), layers=4) is None


def test_a_weight_belongs_to_the_layer_in_its_name() -> None:
    names = ("model.layers.12.mlp.weight", "layers.1.weight", "model.norm.weight", "model.sublayers.3.weight")
    assert [decoder().layer_of(name) for name in names] == [12, 1, None, None]


def test_a_layer_is_read_from_all_files_though_they_are_gone(files: list[str]) -> None:
    host = Checkpoint(files, decoder())
    for file in files:
        Path(file).unlink()
    assert {name: float(weight.max()) for name, weight in host.layer(1)} == {
        "model.layers.1.weight": 1.0,
        "model.layers.1.bias": 1.0,
    }


def test_a_checkpoint_without_a_layer_cannot_move_it(files: list[str]) -> None:
    with pytest.raises(ImmovableModelError, match="no weights of layer 0 in safetensors files"):
        Checkpoint(files[1:], decoder())


def test_tokens_are_embedded_from_the_mapped_file_in_the_engines_type(files: list[str]) -> None:
    table = Checkpoint(files, decoder()).embedding()
    assert table is not None
    embedded = mapped_embedding(table, torch.float32)(torch.tensor([3, 0], dtype=torch.int32))
    assert embedded.dtype is torch.float32
    assert embedded.tolist() == [[6.0, 7.0], [0.0, 1.0]]


def test_a_parameter_keeps_what_vllm_knows_of_it_without_its_memory() -> None:
    class Marked(nn.Parameter):
        pass

    parameter = Marked(torch.ones(2, 3), requires_grad=False)
    parameter.weight_loader = "loader"  # type: ignore[attr-defined]
    made = blank(parameter)
    assert made.is_meta
    again = filled(made)
    assert type(again) is Marked
    assert again.weight_loader == "loader"  # type: ignore[attr-defined]
    assert (again.shape, again.dtype, again.is_meta) == ((2, 3), torch.float32, False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of vLLM's imports
def test_what_a_model_imported_while_every_layer_was_built_is_vllms_own_afterwards() -> None:
    """vLLM's backend for transformers' models is imported then, and would have every rank run every layer for good."""
    utils: Any = importlib.import_module("vllm.distributed.utils")
    loading: Any = importlib.import_module("vllm.model_executor.model_loader")
    own = utils.get_pp_indices, loading.get_model_loader
    with every_layer_built(lambda model: None):
        kept, kept_loader = utils.get_pp_indices, loading.get_model_loader
        assert kept(30, 1, 2) == (0, 30)
        assert (kept, kept_loader) != own
    assert (utils.get_pp_indices, loading.get_model_loader) == own
    assert kept(30, 1, 2) == (15, 30)
    load_config = SimpleNamespace(load_format="dummy", model_loader_extra_config={})
    assert "load_weights" not in vars(kept_loader(load_config))
