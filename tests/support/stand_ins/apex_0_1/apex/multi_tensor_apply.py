"""apex/multi_tensor_apply/."""

from amp_C import refused  # pyright: ignore[reportMissingImports]

multi_tensor_applier = refused("multi_tensor_applier")
