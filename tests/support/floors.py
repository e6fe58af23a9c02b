"""The order of the floors of the package."""

from __future__ import annotations

FLOORS = """
base
layout
config hf
groups
boundary
schedule
models
job
data step
checkpoint estimate
train
cli run
"""
