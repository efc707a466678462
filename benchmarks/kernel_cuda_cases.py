"""What `kernels.py` measures where there is a CUDA device: our operators beside those of other packages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
from kernel_cases import Case, both_ways
from torch import Tensor

_PACKAGES = {"liger_kernel": "Liger-Kernel", "flash_attn": "FlashAttention"}


def absent() -> dict[str, str]:
    """What cannot be measured or compared here, and why."""
    found = {name: "not installed" for package, name in _PACKAGES.items() if find_spec(package) is None}
    if not torch.cuda.is_available():
        found["CUDA"] = "no device"
    return found


def seconds_on_device(function: Callable[[], object], repeats: int = 10) -> float:
    """Seconds of one call on the device, from its own clock."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def norms() -> Iterator[Case]:
    """RMSNorm against torch's and Liger's."""
    from mindspeed_kernels.ops import rms_norm

    tensors = _random(4096, 1, 4096), torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    ours = both_ways(lambda x, g: rms_norm(x, g, 1e-5), tensors)
    native = both_ways(lambda x, g: torch.nn.functional.rms_norm(x, (4096,), g, 1e-5), tensors)
    yield Case("rms norm bfloat16, theirs torch's", ours, native)
    if find_spec("liger_kernel"):
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        yield Case(
            "rms norm bfloat16, theirs Liger's",
            ours,
            both_ways(lambda x, g: LigerRMSNormFunction.apply(x, g, 1e-5), tensors),
        )


def activations() -> Iterator[Case]:
    """SwiGLU against the composition and Liger's."""
    from mindspeed_kernels.ops import swiglu

    def composed(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * value

    tensors = (_random(4096, 22016),)
    ours = both_ways(swiglu, tensors)
    yield Case("swiglu bfloat16, theirs composed", ours, both_ways(composed, tensors))
    if find_spec("liger_kernel"):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        yield Case(
            "swiglu bfloat16, theirs Liger's",
            ours,
            both_ways(lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, dim=-1)), tensors),
        )


def rotations() -> Iterator[Case]:
    """Rotary embedding against Liger's, which rotates queries and keys of one call."""
    if not find_spec("liger_kernel"):
        return
    from liger_kernel.ops.rope import LigerRopeFunction

    from mindspeed_kernels.ops import npu_rotary_position_embedding

    angles = torch.randn(1, 4096, 64, device="cuda").repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    query = _random(1, 32, 4096, 128)

    def ours(x: Tensor) -> Tensor:
        rotate = npu_rotary_position_embedding
        return torch.stack([rotate(part, cos[:, None], sin[:, None]) for part in (x, x)])

    def theirs(x: Tensor) -> Tensor:
        return torch.stack(LigerRopeFunction.apply(x, x, cos, sin))

    yield Case(
        "rotary embedding bfloat16, theirs Liger's", both_ways(ours, (query,)), both_ways(theirs, (query,))
    )


def attentions() -> Iterator[Case]:
    """Causal attention against torch's and FlashAttention."""
    from mindspeed_kernels.ops import npu_fusion_attention

    tensors = tuple(_random(1, 4096, 16, 128) for _ in range(3))
    scale = 128**-0.5

    def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)

    ours = both_ways(
        lambda q, k, v: npu_fusion_attention(q, k, v, 16, "BSND", scale=scale, sparse_mode=2)[0], tensors
    )
    yield Case("attention bfloat16 s=4096, theirs torch's", ours, both_ways(native, tensors))
    if find_spec("flash_attn"):
        from flash_attn import flash_attn_func

        theirs = both_ways(lambda q, k, v: flash_attn_func(q, k, v, causal=True), tensors)
        yield Case("attention bfloat16 s=4096, theirs FlashAttention's", ours, theirs)


CUDA_FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "norm": norms,
    "activation": activations,
    "rotary": rotations,
    "attention": attentions,
}
"""What is measured on a CUDA device, by name."""
