"""`faser evaluate --pipeline`: the second decision's policies in the pipeline world, as table, JSON and picture."""
