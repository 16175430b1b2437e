"""Mechanisms forced on, to be seen."""
