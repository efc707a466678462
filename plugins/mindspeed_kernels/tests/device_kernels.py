"""Operations of the device that must have run for a feature to be what its name says."""

IN_FLOAT32 = {
    "fused-rmsnorm": ("npu_rms_norm", "npu_rms_norm_backward"),
    "fused-swiglu": ("npu_swiglu", "npu_swiglu_backward"),
    "fused-rope": ("npu_rotary_mul", "npu_rotary_mul_backward"),
    "flash-attn": ("npu_fusion_attention", "npu_fusion_attention_grad"),
    "fusion-attn-v2": ("npu_fusion_attention_v2", "npu_fusion_attention_grad_v2"),
    "alibi": ("npu_fusion_attention_v2", "npu_fusion_attention_grad_v2"),
    "grouped-experts": ("npu_grouped_matmul",),
}
"""By feature; these kernels take float32 operands."""
