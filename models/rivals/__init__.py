"""Rules from other systems and papers, behind the same interface as our own policies: the rivals of every table."""
