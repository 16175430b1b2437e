"""The drafter: distil an EAGLE-3 head from a Llama-family target, score it, export it. Imports nothing."""
