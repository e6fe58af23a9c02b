"""Memory, traffic and time of a step, computed from a configuration alone: `--plan`."""
