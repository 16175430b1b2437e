"""`faser demo --tour`: the same prompts with each mechanism forced on in turn."""
