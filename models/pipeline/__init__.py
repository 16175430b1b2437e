"""Policies of the second decision: how many pipelines of how many stages; their evaluation in the pipeline world."""
