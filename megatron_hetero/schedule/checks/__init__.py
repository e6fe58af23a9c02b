"""Whether a schedule ends: every send has its receive, and nothing waits in a cycle. Pure."""
