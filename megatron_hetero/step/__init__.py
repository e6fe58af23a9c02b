"""The training step: descriptions of trained modules, gradients, optimizers, and the runner of a schedule."""
