"""The weights of a rank: its own layers' packed in memory, all others' in the page cache of the checkpoint's file.

A rank loads a layer before a move brings it and drops one that has left, so that it holds what it runs, and during a
move what it will run. The file, which all ranks of the host share, is the copy that survives.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from ..errors import ModelError
from ..patches.pipeline.loading import (
    Decoder,
    blank,
    decoder_of,
    drop_kernels,
    filled,
    is_missing,
    load_layer,
    missing_layer,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

EMBEDDINGS: Final = ("embed_tokens", "wte")  # what the embedding is called in a decoder


class ImmovableModelError(ModelError):
    """A model whose layers cannot move between ranks; vLLM runs it as it is."""


class Checkpoint:
    """The checkpoint's files, kept open: whoever deletes them does not take a layer from a running engine."""

    def __init__(self, files: Iterable[str], decoder: Decoder) -> None:
        self._paths: dict[str, str] = {}  # by weight
        self._by_layer: dict[int, list[str]] = defaultdict(list)
        for file in files:
            self._index(f"/proc/self/fd/{os.open(file, os.O_RDONLY | os.O_CLOEXEC)}", decoder)
        absent = [layer for layer in range(len(decoder.layers)) if layer not in self._by_layer]
        if absent:
            raise ImmovableModelError(f"no weights of layer {absent[0]} in safetensors files", "all layers' in them")

    def _index(self, path: str, decoder: Decoder) -> None:
        from safetensors import safe_open

        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                self._paths[name] = path
                layer = decoder.layer_of(name)
                if layer is not None:
                    self._by_layer[layer].append(name)

    def layer(self, number: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weights) of a layer, read anew; nothing of them stays mapped afterwards."""
        from safetensors import safe_open

        for path in {self._paths[name] for name in self._by_layer[number]}:
            with safe_open(path, "pt") as opened:
                for name in self._by_layer[number]:
                    if self._paths[name] == path:
                        yield name, opened.get_tensor(name)

    def embedding(self) -> Tensor | None:
        """Return the mapped embedding (vocabulary, hidden size), None where the files have none by a known name."""
        from safetensors import safe_open

        for name, path in self._paths.items():
            if name.split(".")[-2:] in [[known, "weight"] for known in EMBEDDINGS]:
                with safe_open(path, "pt") as opened:
                    table: Tensor = opened.get_tensor(name)
                    return table
        return None


class Shelf:
    """The layers of a model on one rank; `held` are those that it can run."""

    def __init__(self, model: Any, config: Any, layers: range, files: Iterable[str]) -> None:
        found = decoder_of(model, config.model_config.hf_text_config.num_hidden_layers)
        if found is None:
            raise ImmovableModelError(
                f"{type(model).__name__}: its forward pass does not read start_layer and end_layer", "one that does"
            )
        self.decoder = found
        self.host = Checkpoint(files, found)
        self.held = set(layers)
        self._config = config
        self._layers: list[Module] = list(found.layers)
        self._blanks = [{name: blank(value) for name, value in layer.named_parameters()} for layer in self._layers]
        for number in range(len(self._layers)):
            if number not in layers:
                self._put_away(number)
        self.run(layers)

    def run(self, layers: range) -> None:
        """Let the forward pass run these layers, which must be held."""
        self.decoder.inner.start_layer, self.decoder.inner.end_layer = layers.start, layers.stop

    def load(self, number: int) -> None:
        """Load a layer's weights."""
        if number in self.held:
            return
        layer = self._layers[number]
        for name, parameter in self._blanks[number].items():
            _put(layer, name, filled(parameter))
        self.decoder.layers[number] = layer
        load_layer(self.decoder, layer, self.host.layer(number), self._config)
        self.held.add(number)

    def keep(self, layers: range) -> None:
        """Drop what is held and not among these layers, and what loading left behind."""
        for number in [number for number in self.held if number not in layers]:
            self._put_away(number)
            self.held.discard(number)
        _give_back_memory()

    def _put_away(self, number: int) -> None:
        layer = self._layers[number]
        drop_kernels(layer)
        for name, parameter in self._blanks[number].items():
            _put(layer, name, parameter)
        self.decoder.layers[number] = missing_layer()

    def embed_anywhere(self) -> bool:
        """Let this rank embed tokens, from the mapped file if it has no embedding; tell whether it can.

        All ranks come to the same answer, as it depends on names alone.
        """
        name = next((name for name in EMBEDDINGS if hasattr(self.decoder.inner, name)), None)
        table = None if name is None else self.host.embedding()
        if name is None or table is None:
            return False
        if is_missing(getattr(self.decoder.inner, name)):
            setattr(self.decoder.inner, name, mapped_embedding(table, self._config.model_config.dtype))
        return True


def mapped_embedding(table: Tensor, dtype: Any) -> Module:
    """Return a module that looks rows up in a mapped table: of the file only they are read."""
    import torch

    class MappedEmbedding(torch.nn.Module):
        """Embeds tokens (rows,) as (rows, hidden size)."""

        def forward(self, tokens: Tensor) -> Tensor:
            """Look the tokens up; a cast after it is the same as one before it."""
            return torch.nn.functional.embedding(tokens.long(), table).to(dtype)

    return MappedEmbedding()


def _put(layer: Module, name: str, parameter: Any) -> None:
    owner, _, attribute = name.rpartition(".")
    layer.get_submodule(owner)._parameters[attribute] = parameter


def _give_back_memory() -> None:
    """Give freed memory back to the system: the C library keeps blocks of this size for later."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
