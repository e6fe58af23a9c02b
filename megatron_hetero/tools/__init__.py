"""Programs beside the training run: the demo, and the evaluation of an exported model."""
