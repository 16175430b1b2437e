"""Answers that a vLLM engine is held to, so that every arm of a benchmark emits the same tokens."""
