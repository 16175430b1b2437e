"""FASER: the sidecar and vLLM plugin that choose speculation lengths, per request and per step."""

__version__ = "0.1.0"
