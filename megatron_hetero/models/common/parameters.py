"""What parameters are called that every family has."""

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
"""Megatron's names of the weights that a tied model has in common."""
TIED_COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
"""What a folder of a tied model may store a second time, and the tensor that it must equal."""
PROJECTOR = ("merger.", "deepstack_merger")
"""What the names of a projector's parameters and stored tensors begin with, within its encoder."""
