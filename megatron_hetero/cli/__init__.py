"""Command lines beside the training run: the plan, the data, import, export, evaluation, the demo."""
