"""Estimates of the memory, traffic and time of a step, computed from only a configuration: `--plan`."""
