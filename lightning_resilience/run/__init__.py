"""A run: its directory, its records, and what they show."""
