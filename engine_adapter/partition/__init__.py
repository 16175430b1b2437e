"""Shares of a device for drafter and target: cores of a CPU, SMs of a GPU."""
