"""A vLLM server as a child, and the load that is put on it."""
