"""The configuration of a run: its settings, in YAML and as flags, and the checks of their values."""
