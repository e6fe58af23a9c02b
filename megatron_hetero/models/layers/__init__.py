"""Layers, described as values that consist of parts, and the torch modules that these values build."""
