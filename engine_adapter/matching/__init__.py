"""Copied drafts: what followed the same words before in a request's own text (prompt lookup, suffix matching)."""
