"""held_answers."""
