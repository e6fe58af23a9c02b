"""What the files in `log.dir` are called."""

METRICS, CONFIG, EVALUATION, LOCK = "metrics.jsonl", "config.yaml", "evaluation.json", ".metrics.lock"
OF_A_RUN = (METRICS, CONFIG, EVALUATION, "events.out.tfevents.*", "trace-rank*.json")
"""What a run writes there, as patterns of names."""
TAKEN = (METRICS, CONFIG, EVALUATION, LOCK, "nccl")
"""Names that nothing else may have there."""
