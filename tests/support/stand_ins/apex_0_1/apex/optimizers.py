"""apex/optimizers/."""

from amp_C import refused  # pyright: ignore[reportMissingImports]

FusedAdam = refused("FusedAdam")
FusedSGD = refused("FusedSGD")
