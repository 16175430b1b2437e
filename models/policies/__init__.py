"""The Policy interface and FASER's own policies."""
