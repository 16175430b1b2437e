"""The only place that touches private names of vLLM; all of them stand in names.py."""
