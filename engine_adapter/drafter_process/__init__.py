"""drafter_process."""
