"""A run: its directory and its records."""
