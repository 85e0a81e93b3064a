"""A run: its directory, and what is written down of it."""
