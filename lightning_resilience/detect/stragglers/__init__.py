"""How long the own work of every rank takes, and who is slow."""
