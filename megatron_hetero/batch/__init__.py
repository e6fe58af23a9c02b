"""From data sets to what each rank computes with in a micro-batch."""
