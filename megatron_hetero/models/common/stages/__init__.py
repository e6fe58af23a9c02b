"""The pipeline stages that families are built from: of encoders and of language models."""
