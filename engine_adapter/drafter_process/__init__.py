"""A drafter in a process of its own: the engine's end, the process, and how both share memory."""
