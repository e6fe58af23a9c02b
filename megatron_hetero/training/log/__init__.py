"""What a run logs: metrics on the terminal, in `log.dir`, and to experiment trackers."""
