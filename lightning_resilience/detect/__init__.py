"""Finds out what has gone wrong in a training: scores and verdicts. Nothing in this folder uses a Trainer."""
