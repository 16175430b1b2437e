"""A batched, compiled simulator of engines, and the records that one of them sends."""
