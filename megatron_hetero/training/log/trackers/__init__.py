"""Experiment trackers that receive a run's metrics in addition to metrics.jsonl, each imported only if asked for."""
