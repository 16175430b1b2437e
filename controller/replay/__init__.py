"""Recorded telemetry through the decision core again: decision replay, off-policy estimate, counterfactual."""
