"""For users of other tools; imported by nothing else here."""
