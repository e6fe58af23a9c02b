"""What a checkpoint is on disk: tensors by name, in files that are whole or not at all."""
