"""The telemetry file: its schema, its one writer, and its readers."""
