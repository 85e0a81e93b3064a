"""Measures the step time of every rank and finds slow ranks."""
