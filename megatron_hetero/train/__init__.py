"""The training program: what it builds, its steps, log, evaluations and end."""
