"""A step: modules as they are trained, their gradients and optimizers, and the runner of a schedule."""
