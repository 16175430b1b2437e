"""A cluster that serves one model by pipelines of 4 to 32 stages: the world of the second decision."""
