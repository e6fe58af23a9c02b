"""transformer_engine/pytorch/router.py."""

from .refused import refused

fused_compute_score_for_moe_aux_loss = refused("fused_compute_score_for_moe_aux_loss")
fused_moe_aux_loss = refused("fused_moe_aux_loss")
fused_topk_with_score_function = refused("fused_topk_with_score_function")
