"""Drafting ahead of verification, and ping-pong groups of requests."""
