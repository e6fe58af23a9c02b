"""What families share of stored tensors, and of the maps from parameters to them."""
