"""Schedules: the order in which modules and boundaries run in a step."""
