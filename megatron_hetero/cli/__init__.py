"""Command-line tools around the training run: the plan, the data, import, export, evaluation, the demo."""
