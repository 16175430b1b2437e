"""What FASER cannot do on vLLM's V2 model runner (the CUDA default), what that costs and how to get it.

Read by the V2 runner mixin's start-up log and by `faser doctor`; a table and a filter, nothing else. Imports nothing
of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

VERIFICATION_GRAPHS: Final = "verification graphs per length"
_ONE_PASS: Final = frozenset({"dflash", "dspark", "ngram", "ngram_gpu", "extract_hidden_states"})


@dataclass(frozen=True, slots=True)
class DraftingFacts:
    """What decides which limits hold; read from vLLM's speculative configuration."""

    method: str
    has_table: bool  # num_speculative_tokens_per_batch_size is set
    is_adaptive: bool  # enable_adaptive_verification

    @classmethod
    def of(cls, speculative_config: Any) -> DraftingFacts:
        """Read vLLM's SpeculativeConfig (0.32 and 0.33)."""
        return cls(
            str(speculative_config.method),
            speculative_config.num_speculative_tokens_per_batch_size is not None,
            bool(getattr(speculative_config, "enable_adaptive_verification", False)),
        )


@dataclass(frozen=True, slots=True)
class Limit:
    """One mechanism that V2 lacks or bounds: one line each of what, cost and remedy."""

    name: str
    what: str
    cost: str
    remedy: str

    def line(self) -> str:
        """Return the limit as one log line."""
        return f"{self.what}; cost: {self.cost}; remedy: {self.remedy}"


_V1 = "VLLM_USE_V2_MODEL_RUNNER=0"

LIMITS_V2: Final = (
    Limit(
        "ragged drafting",
        "V2 drafts the longest length of the batch for every request; each request still verifies its own length",
        "one deep request makes all others draft as deep, rows (longest - k_i) of drafting per request are thrown away",
        f"{_V1} drafts each request its own length (eagle, eagle3, draft_model, ngram)",
    ),
    Limit(
        "draft rounds of draft_model",
        "V2's draft_model speculator ignores the length asked for and always runs num_speculative_tokens rounds, "
        "without CUDA graphs",
        "shorter lengths save verification only, length 0 still pays the whole drafting",
        f"{_V1}, or configure num_speculative_tokens no larger than the longest length that pays",
    ),
    Limit(
        VERIFICATION_GRAPHS,
        "full CUDA graphs replay steps of mixed draft lengths only where the attention backend is FlashAttention 3 or "
        "Triton, and not with cudagraph_mode PIECEWISE, LoRA, or ranks in a pipeline",
        "such steps run piecewise graphs (or eagerly with FULL_DECODE_ONLY)",
        "--attention-backend TRITON_ATTN where the model can use it; else num_speculative_tokens_per_batch_size and "
        "few distinct lengths",
    ),
    Limit(
        "first drafting pass",
        "length 0 still runs the drafter's first pass, which keeps its KV cache in step",
        "one drafter pass per step",
        "none while the engine runs; start without --speculative-config to be rid of it",
    ),
    Limit(
        "adaptive verification",
        "vLLM's adaptive verification shortens FASER's lengths on the device, and the host never learns by how much",
        "drafts that were not verified look rejected, so FASER underestimates acceptance",
        '"enable_adaptive_verification": false in --speculative-config',
    ),
    Limit(
        "drafter confidence",
        "V2 reports no drafter probabilities to FASER",
        "lengths follow each request's history only",
        "none in this version",
    ),
    Limit(
        "pruning and overlap",
        "V2 runs the target as one captured graph: no row leaves it early and drafting starts after sampling",
        "rows behind a certain rejection are computed to the last layer",
        "none in this version",
    ),
)


def limits_for(facts: DraftingFacts) -> list[Limit]:
    """Return the limits that hold for one configuration, by what is known before its model is loaded."""
    hidden = {"ragged drafting", "first drafting pass"} if facts.method in _ONE_PASS else set()
    if facts.method != "draft_model":
        hidden.add("draft rounds of draft_model")
    hidden.add(VERIFICATION_GRAPHS)  # v2_graphs.py says what holds, once it has seen the attention backend
    if not facts.is_adaptive:
        hidden.add("adaptive verification")
    return [limit for limit in LIMITS_V2 if limit.name not in hidden]
