"""Apex's extension that adds gradients of weights in the matrix product. To Megatron-Core its presence is a switch."""

from amp_C import refused  # pyright: ignore[reportMissingImports]

wgrad_gemm_accum_fp32 = refused("wgrad_gemm_accum_fp32")
wgrad_gemm_accum_fp16 = refused("wgrad_gemm_accum_fp16")
