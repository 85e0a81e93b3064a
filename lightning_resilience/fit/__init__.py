"""One fit: its participants, the order in which they are called, and the state that is saved and restored."""
