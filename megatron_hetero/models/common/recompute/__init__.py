"""What layers do not keep from their forward to their backward pass, and make again instead."""
