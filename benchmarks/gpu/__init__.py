"""What only a GPU can show, for a machine with one: `python -m benchmarks.gpu`."""
