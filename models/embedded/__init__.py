"""The embedded target and drafter: found, converted, checked, computed."""
