"""A configuration in a world of ranks: each module by itself, and all of them with graph, batch and schedule."""
