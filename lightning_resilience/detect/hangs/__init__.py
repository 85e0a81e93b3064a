"""Which rank does not advance, and why."""
