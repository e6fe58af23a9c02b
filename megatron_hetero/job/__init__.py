"""A configuration bound to a world of ranks: single modules, and the job with graph, batch and schedule."""
