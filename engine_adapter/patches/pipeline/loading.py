"""How vLLM builds and loads a model, with every layer built on every rank and few of them loaded.

Called by stages/shelf.py inside a worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from threading import Event
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, ModuleList, Parameter

Weights = Iterable[tuple[str, "Tensor"]]


@dataclass(frozen=True, slots=True)
class Decoder:
    """The part of a model that runs a range of its layers."""

    model: Any  # what vLLM calls
    inner: Any  # whose forward reads start_layer and end_layer
    layers: ModuleList
    name: str  # of `layers` in `inner`

    def layer_of(self, weight: str) -> int | None:
        """Return the number of the layer to which a weight of the checkpoint belongs."""
        found = re.search(rf"(?:^|\.){self.name}\.(\d+)\.", weight)
        return None if found is None else int(found[1])


def decoder_of(model: Any, layers: int) -> Decoder | None:
    """Return the part that runs a range of layers, None for an architecture whose forward does not read a range."""
    from torch.nn import ModuleList

    for inner in model.modules():
        code = getattr(getattr(type(inner), "forward", None), "__code__", None)
        if code is None or not {"start_layer", "end_layer"} <= {*code.co_names, *code.co_varnames}:
            continue
        for name, child in inner.named_children():
            if isinstance(child, ModuleList) and len(child) == layers:
                return Decoder(model, inner, child, name)
    return None


@contextmanager
def every_layer_built(before_weights: Callable[[Any], None]) -> Iterator[None]:
    """Let vLLM build all layers on this rank; `before_weights` sees the model before its weights are loaded.

    A model's module that is imported in the block keeps what it imports by name (0.32 models/transformers/base.py), so
    the functions put in place do as vLLM's own once the block is left.
    """
    utils: Any = import_module("vllm.distributed.utils")
    loading: Any = import_module("vllm.model_executor.model_loader")
    indices, make, is_left = utils.get_pp_indices, loading.get_model_loader, Event()

    def get_pp_indices(layers: int, rank: int, ranks: int) -> Any:
        return indices(layers, rank, ranks) if is_left.is_set() else (0, layers)

    def get_model_loader(load_config: Any) -> Any:
        loader = make(load_config)
        if is_left.is_set():
            return loader
        inherited = loader.load_weights

        def load_weights(model: Any, model_config: Any) -> None:
            before_weights(model)
            inherited(model, model_config)

        loader.load_weights = load_weights
        return loader

    utils.get_pp_indices, loading.get_model_loader = get_pp_indices, get_model_loader
    try:
        yield
    finally:
        is_left.set()
        utils.get_pp_indices, loading.get_model_loader = indices, make


def forget_layers(config: Any) -> None:
    """Let the layers of a model that was given up be built again under the same names."""
    config.compilation_config.static_forward_context.clear()


def missing_layer() -> Module:
    """Return what vLLM has in place of a layer that is on another rank."""
    from vllm.model_executor.models.utils import PPMissingLayer

    return PPMissingLayer()  # type: ignore[no-untyped-call]


def is_missing(module: object) -> bool:
    """Tell whether a module is in place of one on another rank."""
    from vllm.model_executor.models.utils import PPMissingLayer

    return isinstance(module, PPMissingLayer)


def forget_missing(model: Any) -> None:
    """Let vLLM see which layers are missing now; it looks once for each model."""
    from vllm.model_executor.models import utils

    utils._model_to_pp_missing_layer_names.pop(id(model), None)


def load_layer(decoder: Decoder, layer: Module, weights: Weights, config: Any) -> None:
    """Load the weights of a layer that stands in its place, and pack them as vLLM does at its start."""
    import torch
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    forget_missing(decoder.model)
    loaded, expected = decoder.model.load_weights(weights), len(list(layer.parameters()))
    if loaded is not None and len(loaded) != expected:
        raise RuntimeError(f"{len(loaded)} of a layer's {expected} weights loaded: the checkpoint has changed")
    process_weights_after_loading(layer, config.model_config, torch.device("cpu"))


def drop_kernels(layer: Module) -> None:
    """Let go of the packed weights of a layer (0.32 layers/utils.py: they live in a closure)."""
    for module in layer.modules():
        module.__dict__.pop("cpu_linear", None)


def blank(parameter: Parameter) -> Parameter:
    """Return the parameter without its memory, and with all that vLLM knows of it."""
    return _as(parameter, parameter.data.to("meta"))


def filled(parameter: Parameter) -> Parameter:
    """Return a blank parameter with memory of its own, in which anything may stand."""
    import torch

    return _as(parameter, torch.empty_like(parameter.data, device="cpu"))


def _as(parameter: Parameter, data: Tensor) -> Parameter:
    import torch

    made = torch.nn.Parameter(data, requires_grad=False)
    made.__class__ = parameter.__class__
    made.__dict__.update(parameter.__dict__)
    return made


def checkpoint_files(config: Any) -> list[str]:
    """Return the paths of the model's safetensors files; empty where it has none."""
    from vllm.model_executor.model_loader import get_model_loader

    loader, model = get_model_loader(config.load_config), config.model_config
    if not hasattr(loader, "_prepare_weights"):
        return []
    try:
        _, files, is_safetensors, _ = loader._prepare_weights(model.model, None, model.revision, False, None)
    except RuntimeError:  # the model has files of another kind
        return []
    return sorted(files) if is_safetensors else []
