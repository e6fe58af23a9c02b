"""The training program: its start, steps, log, evaluations and end."""
