"""The `faser` command: one module a group of commands; each only parses and calls the room that does the work."""
