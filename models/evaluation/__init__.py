"""Policies against rivals and hindsight in simulated worlds."""
