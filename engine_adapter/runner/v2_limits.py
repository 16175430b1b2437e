"""What FASER cannot do on vLLM's V2 model runner (the CUDA default), what that costs and how to get it.

Read by the V2 runner mixin's start-up log and by `faser doctor`; a table and a filter, nothing else. Imports nothing
of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

VERIFICATION_GRAPHS: Final = "verification graphs per length"
_SEARCHES: Final = frozenset({"ngram", "ngram_gpu", "extract_hidden_states"})  # these have no confidences
_ONE_PASS: Final = _SEARCHES | {"dflash", "dspark"}


@dataclass(frozen=True, slots=True)
class DraftingFacts:
    """What decides which limits hold; read from vLLM's speculative configuration."""

    method: str
    is_adaptive: bool  # enable_adaptive_verification
    is_by_block: bool = False  # rejection_sample_method is block

    @classmethod
    def of(cls, speculative_config: Any) -> DraftingFacts:
        """Read vLLM's SpeculativeConfig (0.32 and 0.33)."""
        return cls(
            str(speculative_config.method),
            bool(getattr(speculative_config, "enable_adaptive_verification", False)),
            getattr(speculative_config, "rejection_sample_method", "") == "block",
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
        "V2 drafts the longest length of the batch for every request with draft_model, and where it runs the "
        "drafter's rounds as one (most CUDA attention backends); each request still verifies its own length",
        "one deep request makes all others draft as deep, rows (longest - k_i) of drafting per request are thrown away",
        f"{_V1} drafts each request its own length (eagle, eagle3, draft_model, ngram)",
    ),
    Limit(
        VERIFICATION_GRAPHS,
        "full CUDA graphs replay steps of mixed draft lengths only where vLLM's attention backend takes them, such "
        "as FlashAttention 3 or Triton, and not with cudagraph_mode PIECEWISE, LoRA, or ranks in a pipeline",
        "such steps run piecewise graphs (or eagerly with FULL_DECODE_ONLY)",
        "--attention-backend TRITON_ATTN where the model can use it; else num_speculative_tokens_per_batch_size and "
        "few distinct lengths",
    ),
    Limit(
        "first drafting pass",
        "the drafter's first pass runs for the whole batch, or for nobody where all lengths are 0; then it catches up "
        "later, at the latest behind FASER_SKIPPED_TOKENS, and not with LoRA, a KV connector or sliding windows",
        "one row of that pass per request of length 0 beside others that draft",
        f"{_V1} on a CPU leaves out each request of length 0",
    ),
    Limit(
        "stop rules",
        "V2 tells the drafter's confidences one step later, so that no draft ends by them",
        "tokens that confidence would drop are drafted and verified",
        '"enable_adaptive_verification": true in --speculative-config verifies what pays',
    ),
    Limit(
        "pruning and overlap",
        "rows leave the target early on a CPU only, and with --enforce-eager; nothing is drafted ahead; two groups of "
        "requests draft and verify side by side only where FASER_PING_PONG asks for them",
        "rows behind a certain rejection are computed to the last layer; drafting starts after sampling",
        "FASER_PING_PONG=auto keeps two groups where they are measured to be faster",
    ),
    Limit(
        "block verification",
        "vLLM's block verification judges a position by the same noise in every step that drafts it, so that sampled "
        "answers without a seed leave the target's distribution, with FASER or without",
        "wrong probabilities, by a few percent",
        '"rejection_sample_method": "standard" in --speculative-config, or a seed in the request, which FASER obeys',
    ),
)


def limits_for(facts: DraftingFacts) -> list[Limit]:
    """Return the limits that hold for one configuration, by what is known before its model is loaded."""
    hidden = {VERIFICATION_GRAPHS}  # v2_graphs.py says what holds, once it has seen the attention backend
    if facts.method in _ONE_PASS:
        hidden |= {"ragged drafting", "first drafting pass"}
    if facts.is_adaptive or facts.method in _SEARCHES:
        hidden.add("stop rules")
    if not facts.is_by_block:
        hidden.add("block verification")
    return [limit for limit in LIMITS_V2 if limit.name not in hidden]
