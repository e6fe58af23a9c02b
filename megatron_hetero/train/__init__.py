"""The training program: start, training steps, logging, evaluation and end of a run."""
