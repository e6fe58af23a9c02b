"""What families share of reading, checking and joining configurations."""
