"""What parameters are called that every family has."""

TIED_COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
"""What a folder of a tied model may store a second time, and the tensor that it must equal."""
