"""Draws of requests that have a seed: the same token at the same place, whatever was drafted."""
