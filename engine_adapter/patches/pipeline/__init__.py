"""Private names of vLLM that moving stages touch; names.py has them all."""
