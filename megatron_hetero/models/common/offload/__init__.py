"""What layers keep for their backward pass in host memory, copied out and back beside the computation."""
