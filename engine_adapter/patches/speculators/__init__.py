"""Private names of the speculators of vLLM's V2 runner; names_v2.py has them all."""
