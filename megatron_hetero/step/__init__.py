"""A step: modules as they are trained, their gradients and optimizers, and what runs them."""
