"""Layers as values made of parts, and the torch modules that they build."""
