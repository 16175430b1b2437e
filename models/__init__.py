"""The Policy protocol, all policies, and the released weights. Imports env and engine_adapter only."""
