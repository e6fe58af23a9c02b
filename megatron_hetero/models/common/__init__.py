"""What model families share: attention, layers, loss, and their cost."""
