"""Experiment trackers that receive a run's metrics besides metrics.jsonl, each imported only if asked for."""
