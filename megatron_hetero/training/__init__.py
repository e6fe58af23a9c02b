"""Training: configuration, learning rate, metrics, and the loop that joins them."""
