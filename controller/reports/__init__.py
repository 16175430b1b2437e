"""Pictures and HTML pages of what was measured."""
