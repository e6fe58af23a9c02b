"""What a configuration means for a world of ranks, before anything starts: parameters, traffic, memory, time."""
