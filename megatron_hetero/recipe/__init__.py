"""What a training program of one's own calls, with modules of any kind."""
