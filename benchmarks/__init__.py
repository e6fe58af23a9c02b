"""What the README's numbers come from: `python -m benchmarks.step`."""
