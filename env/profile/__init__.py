"""An engine's cost model as a file, and the shipped ones."""
