"""One fit: who takes part in it, in which order, and what is saved and restored of it."""
