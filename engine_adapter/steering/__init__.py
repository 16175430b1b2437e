"""Lengths for the next step, and the record of the last one."""
