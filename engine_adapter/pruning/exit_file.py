"""Which engines can prune, and what a file of exit heads says of itself; read where HELLO is made and in the worker.

A file is a safetensors file whose metadata names the model it was trained on. Imports neither torch nor vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..errors import ModelError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..protocol import Prune

FORMAT: Final = "faser-exits-1"
METHODS: Final = frozenset({"draft_model", "eagle", "eagle3", "ngram"})
METHODS_V2: Final = METHODS | {"ngram_gpu"}
SEARCHES: Final = frozenset({"ngram", "ngram_gpu"})
ARCHITECTURES: Final = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


class ExitError(ModelError):
    """Exit heads that cannot be used: what was seen, what was expected."""


@dataclass(frozen=True, slots=True)
class ExitFacts:
    """What the file's metadata says."""

    layers: tuple[int, ...]  # behind which a head was trained, ascending
    target_layers: int
    hidden_size: int
    vocabulary: int
    candidates: int  # tokens the drafter shall note at each position
    released: Prune | None = None  # layer and threshold that saved most time when the heads were judged


def read_facts(path: str) -> ExitFacts:
    """Return what the file says; raise ExitError if it is no file of exit heads."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            said = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ExitError(f"{path}: {error}; expected exit heads, as `faser exits train` writes them") from None
    if said.get("format") != FORMAT:
        raise ExitError(f"{path}: format {said.get('format')!r}, expected {FORMAT!r}; train the heads again")
    try:
        return ExitFacts(
            tuple(sorted(int(layer) for layer in said["layers"].split(","))),
            int(said["target_layers"]),
            int(said["hidden_size"]),
            int(said["vocabulary"]),
            int(said["candidates"]),
            _released(said.get("released", "")),
        )
    except (KeyError, ValueError) as error:
        raise ExitError(f"{path}: metadata {error} is missing or no number; train the heads again") from None


def _released(text: str) -> Prune | None:
    """Read "layer,threshold"; a file that does not say can prune, but nobody knows from what threshold on."""
    if not text:
        return None
    from ..protocol import Prune

    layer, threshold = text.split(",")
    return Prune(int(layer), float(threshold))


def check_model(path: str, facts: ExitFacts, layers: int, hidden_size: int, vocabulary: int) -> None:
    """Raise ExitError if the heads were trained on a model of another shape."""
    seen = (facts.target_layers, facts.hidden_size, facts.vocabulary)
    if seen != (layers, hidden_size, vocabulary):
        raise ExitError(
            f"{path} is for a model of {seen[0]} layers, hidden size {seen[1]} and vocabulary {seen[2]}; "
            f"this one has {layers}, {hidden_size} and {vocabulary}; train its own with `faser exits train`"
        )
    if not all(0 < layer < layers for layer in facts.layers):
        raise ExitError(f"{path} has heads behind layers {facts.layers}, expected 1 to {layers - 1}")


def _check_method(path: str, facts: ExitFacts, config: VllmConfig) -> None:
    """Raise ExitError if the heads score candidates that this drafter does not name: no step would be pruned."""
    drafting = config.speculative_config
    if facts.candidates and drafting is not None and drafting.method in SEARCHES:
        raise ExitError(
            f"{path} has heads that score the drafter's {facts.candidates} likeliest tokens, and {drafting.method} "
            f"names none; expected one of {_names(METHODS - SEARCHES)}"
        )


def pruning_refusal(config: VllmConfig) -> str | None:
    """Return why verification cannot be pruned on this engine, None if it can."""
    from vllm.platforms import current_platform

    parallel, drafting, is_v2 = config.parallel_config, config.speculative_config, config.use_v2_model_runner
    methods = METHODS_V2 if is_v2 else METHODS
    if drafting is None or drafting.method not in methods:
        return f"speculative method {drafting.method if drafting else None!r}; expected one of {_names(methods)}"
    architecture = (config.model_config.architectures or ["none"])[0]
    if architecture not in ARCHITECTURES:
        return f"architecture {architecture}; expected one of {_names(ARCHITECTURES)}"
    if not current_platform.is_cpu() and not (is_v2 and current_platform.is_cuda()):
        return f"device {current_platform.device_type}; expected a CPU, or CUDA with vLLM's V2 runner"
    if config.scheduler_config.async_scheduling and not is_v2:
        return "async scheduling; start with --no-async-scheduling"
    if is_v2 and (reason := _refusal_v2(config)):
        return reason
    if config.compilation_config.mode:
        remedy = "-cc.mode=0, which keeps full CUDA graphs" if is_v2 else "--enforce-eager"
        return f"a compiled target; start with {remedy}"
    if max(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.data_parallel_size) > 1:
        return "several ranks: their decisions could differ"
    if config.lora_config is not None:
        return "LoRA: its rows are mapped to adapters before the cut"
    if config.kv_transfer_config is not None:
        return "a KV connector: it would copy slots that the cut left unwritten"
    return None


def _refusal_v2(config: VllmConfig) -> str | None:
    """Return what of V2's own does not go with a cut."""
    from ..mixed_graphs import APART, graph_mode

    drafting: Any = config.speculative_config
    if getattr(drafting, "enable_adaptive_verification", False):
        return "adaptive verification: it chooses what is verified by itself"
    rule = getattr(drafting, "rejection_sample_method", "standard")
    if rule != "standard":
        return f"rejection_sample_method={rule}: only standard judges a token without looking behind it"
    if (mode := graph_mode(config)) == "PIECEWISE":
        return f"cudagraph_mode {mode}: its graphs begin and end at attention; start with -cc.cudagraph_mode={APART[1]}"
    return None


def usable_exits(path: str, config: VllmConfig) -> tuple[ExitFacts | None, str | None]:
    """Return the exit heads with which this engine can prune, and why there are none if there is a reason."""
    if not path:
        return None, None
    if reason := pruning_refusal(config):
        return None, reason
    text: Any = config.model_config.hf_text_config
    try:
        facts = read_facts(path)
        check_model(path, facts, text.num_hidden_layers, text.hidden_size, text.vocab_size)
        _check_method(path, facts, config)
    except ExitError as error:
        return None, str(error)
    return facts, None


def _names(values: frozenset[str]) -> str:
    return ", ".join(sorted(values))
