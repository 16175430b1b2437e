"""Arrivals, lengths and prompts: shipped traces, synthetic loads, held-out prompts."""
