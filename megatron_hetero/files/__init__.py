"""Files that users and other programs write: opened without surprises, read as JSON, locked."""
