"""transformer_engine/pytorch/tensor/."""


class QuantizedTensor:
    """Parameters and activations are asked whether they are of this kind."""
