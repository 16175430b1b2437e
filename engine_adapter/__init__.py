"""Runs inside vLLM: wire protocol, link, lease, scheduler and runner mixins. Imports no upper floor."""
