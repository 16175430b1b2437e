"""The engine's end of the wire; nothing here ever waits."""
