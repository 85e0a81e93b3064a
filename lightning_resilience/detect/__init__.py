"""What has gone wrong: scores and verdicts. No Trainer in here."""
