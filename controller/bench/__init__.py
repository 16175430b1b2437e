"""`faser bench`: FASER beside every rival, on real vLLM servers that take turns."""
