"""Finds the rank that does not advance, and the reason."""
