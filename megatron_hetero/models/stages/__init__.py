"""Pipeline stages of encoders and of language models, built from lists of layers."""
