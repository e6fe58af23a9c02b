"""Command-line tools around the training run: the data, import, export, evaluation, the demo."""
