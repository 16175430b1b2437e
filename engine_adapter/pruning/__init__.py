"""Rows that leave the target's forward pass early, and the heads that say which."""
