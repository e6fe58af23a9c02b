"""File names in `log.dir`."""

METRICS, CONFIG, EVALUATION, LOCK = "metrics.jsonl", "config.yaml", "evaluation.json", ".metrics.lock"
WANDB_ID = "wandb-run-id"
"""The id of the Weights & Biases run, which a resumed run continues."""
OF_A_RUN = (METRICS, CONFIG, EVALUATION, WANDB_ID, "events.out.tfevents.*", "trace-rank*.json")
"""What a run writes there, as glob patterns."""
