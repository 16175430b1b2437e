"""What is known of one engine, kept up to date from its records."""
