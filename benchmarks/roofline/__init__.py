"""What a step would take on a GPU, from what it asks of one: see `__main__`."""
