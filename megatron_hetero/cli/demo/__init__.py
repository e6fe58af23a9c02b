"""The parts of the demo: a small model, drawn pictures, questions about them, a configuration."""
