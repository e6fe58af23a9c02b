"""What families share of their small models with random weights."""
