"""From a profile's telemetry to an engine's cost model, and how faithful a simulation with it is."""
