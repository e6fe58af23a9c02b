"""The configuration of a run: what can be set, in YAML and as flags, and what its values must fulfil."""
