"""Ragged drafting: a request leaves the draft batch after its own number of tokens."""
