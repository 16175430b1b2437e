"""State estimation, observation and action spaces, and the simulator. Imports engine_adapter only."""
