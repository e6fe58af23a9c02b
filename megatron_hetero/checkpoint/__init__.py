"""Checkpoints that any layout can read: what they hold, how they are written whole or not at all, how a run resumes."""
