"""The pure core, one record in and one action set out, and the guards around it."""
