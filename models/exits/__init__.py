"""Exit heads: recorded from the user's own engine, trained, judged and written. `faser exits` calls it."""
