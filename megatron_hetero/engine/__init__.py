"""A module as it is trained: weights, gradients, optimizer, learning rate."""
