"""What chooses kernels and schedules on a Hopper GPU: `python -m benchmarks.gpu --sections hopper`."""
