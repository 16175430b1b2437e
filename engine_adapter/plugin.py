"""vLLM's entry point `vllm.general_plugins`: called once in every process of an engine.

FASER is switched on by `--scheduler-cls` and `--worker-cls`; this only says which vLLM was found. It must never
raise: vLLM guards the loading of a plugin, not the call.
"""

from __future__ import annotations

from .operator_log import operator_log

logger = operator_log(__name__)


def register() -> None:
    """Log one line if this vLLM cannot be steered; idempotent."""
    try:
        from .patches.versions import unsupported_reason, vllm_version

        if reason := unsupported_reason(vllm_version()):
            logger.warning("FASER is off: %s", reason)
    except Exception:
        logger.exception("FASER could not tell vLLM's version; it stays off")
