"""Bytes that a plan takes on a rank: weights, activations, buffers, communicators. Pure."""
