"""Cases of `kernels.py` on a CUDA device: our operators beside those of other packages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from kernel_cases import Case, both_ways
from torch import Tensor


@dataclass(frozen=True)
class Setting:
    """Device and size of the cases.

    Attributes:
        device: type of device; anything but ``cuda`` only runs the code.
        tokens: rows of norms and activations, length of the sequence elsewhere.
        hidden: width of a row; a multiple of 256.
    """

    device: str = "cuda"
    tokens: int = 4096
    hidden: int = 4096

    def random(self, *shape: int) -> Tensor:
        """Return random bfloat16 numbers."""
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device)

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return the function as torch.compile makes it, traced only where there is no CUDA device."""
        made: Callable[..., Tensor] = torch.compile(
            function, backend="inductor" if self.device == "cuda" else "eager"
        )
        return made


ON_CUDA = Setting()
_PACKAGES = {"liger_kernel": "Liger-Kernel", "flash_attn": "FlashAttention"}


def absent() -> dict[str, str]:
    """Cases that cannot be measured or compared here, with the reason."""
    found = {name: "not installed" for package, name in _PACKAGES.items() if find_spec(package) is None}
    if not torch.cuda.is_available():
        found["CUDA"] = "no device"
    return found


def seconds_on_device(function: Callable[[], object], repeats: int = 10, device: str = "cuda") -> float:
    """Seconds of one call on the device, from its own clock."""
    if device != "cuda":
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def norms(on: Setting = ON_CUDA) -> Iterator[Case]:
    """RMSNorm against torch's and Liger's."""
    from mindspeed_kernels.ops import rms_norm

    weight = torch.ones(on.hidden, dtype=torch.bfloat16, device=on.device)
    tensors = on.random(on.tokens, 1, on.hidden), weight

    def native(x: Tensor, g: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (on.hidden,), g, 1e-5)

    ours = both_ways(lambda x, g: rms_norm(x, g, 1e-5), tensors)
    yield Case("rms norm bfloat16, theirs torch's", ours, both_ways(native, tensors))
    yield Case("rms norm bfloat16, theirs torch.compile's", ours, both_ways(on.compiled(native), tensors))
    if find_spec("liger_kernel"):
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        yield Case(
            "rms norm bfloat16, theirs Liger's",
            ours,
            both_ways(lambda x, g: LigerRMSNormFunction.apply(x, g, 1e-5), tensors),
        )


def activations(on: Setting = ON_CUDA) -> Iterator[Case]:
    """SwiGLU against the composition and Liger's."""
    from mindspeed_kernels.ops import swiglu

    def composed(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * value

    # Two projections to 43/16 of the hidden size, as models of the Llama family have them.
    tensors = (on.random(on.tokens, on.hidden * 43 // 8),)
    ours = both_ways(swiglu, tensors)
    yield Case("swiglu bfloat16, theirs composed", ours, both_ways(composed, tensors))
    yield Case("swiglu bfloat16, theirs torch.compile's", ours, both_ways(on.compiled(composed), tensors))
    if find_spec("liger_kernel"):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        yield Case(
            "swiglu bfloat16, theirs Liger's",
            ours,
            both_ways(lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, dim=-1)), tensors),
        )


def rotations(on: Setting = ON_CUDA) -> Iterator[Case]:
    """Rotary embedding against the composition and Liger's, which rotates queries and keys at once."""
    from mindspeed_kernels.ops import npu_rotary_position_embedding as rotate

    angles = torch.randn(1, on.tokens, 64, device=on.device).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    query = on.random(1, on.hidden // 128, on.tokens, 128)

    def ours(x: Tensor) -> Tensor:
        return torch.stack([rotate(part, cos[:, None], sin[:, None]) for part in (x, x)])

    def composed(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return torch.stack([(x * cos[:, None] + turned * sin[:, None]).to(x.dtype) for _ in range(2)])

    mine = both_ways(ours, (query,))
    yield Case("rotary embedding bfloat16, theirs composed", mine, both_ways(composed, (query,)))
    theirs = both_ways(on.compiled(composed), (query,))
    yield Case("rotary embedding bfloat16, theirs torch.compile's", mine, theirs)
    if find_spec("liger_kernel"):
        from liger_kernel.ops.rope import LigerRopeFunction

        theirs = both_ways(lambda x: torch.stack(LigerRopeFunction.apply(x, x, cos, sin)), (query,))
        yield Case("rotary embedding bfloat16, theirs Liger's", mine, theirs)


def attentions(on: Setting = ON_CUDA) -> Iterator[Case]:
    """Causal attention against torch's and FlashAttention."""
    from mindspeed_kernels.ops import npu_fusion_attention

    count = max(1, on.hidden // 256)
    tensors = tuple(on.random(1, on.tokens, count, 128) for _ in range(3))
    scale = 128**-0.5

    def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)

    ours = both_ways(
        lambda q, k, v: npu_fusion_attention(q, k, v, count, "BSND", scale=scale, sparse_mode=2)[0], tensors
    )
    yield Case(f"attention bfloat16 s={on.tokens}, theirs torch's", ours, both_ways(native, tensors))
    if find_spec("flash_attn"):
        from flash_attn import flash_attn_func

        theirs = both_ways(lambda q, k, v: flash_attn_func(q, k, v, causal=True), tensors)
        yield Case(f"attention bfloat16 s={on.tokens}, theirs FlashAttention's", ours, theirs)


CUDA_FAMILIES: dict[str, Callable[..., Iterator[Case]]] = {
    "norm": norms,
    "activation": activations,
    "rotary": rotations,
    "attention": attentions,
}
"""Cases on a CUDA device, by name."""
