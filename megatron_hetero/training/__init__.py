"""Training: its start, its steps, what it logs, its end, and the export."""
