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
        vocabulary: logits of a token.
    """

    device: str = "cuda"
    # Inputs of several times what the cache holds.
    tokens: int = 8192
    hidden: int = 4096
    vocabulary: int = 32000

    def random(self, *shape: int) -> Tensor:
        """Return random bfloat16 numbers."""
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device)

    def has(self, package: str) -> bool:
        """Return whether a package takes part, which needs a device."""
        return self.device == "cuda" and find_spec(package) is not None

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


_CYCLES = 60_000_000
"""Cycles that the device idles, about 30 ms, while calls are queued: what is measured is its time alone."""


def seconds_on_device(function: Callable[[], object], repeats: int = 10, device: str = "cuda") -> float:
    """Seconds of one call on the device, from its own clock; the host's launches do not count."""
    if device != "cuda":
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_CYCLES)
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
    if on.has("liger_kernel"):
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        yield Case(
            "rms norm bfloat16, theirs Liger's",
            ours,
            both_ways(lambda x, g: LigerRMSNormFunction.apply(x, g, 1e-5), tensors),
        )
    zero = tensors[0], torch.zeros_like(weight)

    def centered(x: Tensor, g: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x.float(), (on.hidden,), 1.0 + g.float(), 1e-5).to(x.dtype)

    ours = both_ways(lambda x, g: rms_norm(x, g, 1e-5, True), zero)
    yield Case(
        "zero-centred norm bfloat16, theirs torch.compile's", ours, both_ways(on.compiled(centered), zero)
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
    if on.has("liger_kernel"):
        from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

        theirs = both_ways(lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, dim=-1)), tensors)
        yield Case("swiglu bfloat16, theirs Liger's of two tensors", ours, theirs)
        theirs = both_ways(lambda x: LigerFusedGateUpSiLUMulFunction.apply(x), tensors)
        yield Case("swiglu bfloat16, theirs Liger's", ours, theirs)


def rotations(on: Setting = ON_CUDA) -> Iterator[Case]:
    """Rotary embedding against the composition and Liger's, which rotates queries and keys at once."""
    from mindspeed_kernels.ops import npu_rotary_position_embedding as rotate

    angles = torch.randn(1, on.tokens, 64, device=on.device).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    query = on.random(1, on.tokens, on.hidden // 128, 128).transpose(1, 2)

    def ours(x: Tensor) -> Tensor:
        return rotate(x, cos[:, None], sin[:, None])

    def composed(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)

    mine = both_ways(ours, (query,))
    yield Case("rotary embedding bfloat16, theirs composed", mine, both_ways(composed, (query,)))
    theirs = both_ways(on.compiled(composed), (query,))
    yield Case("rotary embedding bfloat16, theirs torch.compile's", mine, theirs)
    if on.has("liger_kernel"):
        from liger_kernel.ops.rope import LigerRopeFunction

        # It rotates keys besides, here those of one head, and overwrites both.
        theirs = both_ways(lambda x: LigerRopeFunction.apply(x, x[:, :1].clone(), cos, sin)[0], (query,))
        yield Case("rotary embedding bfloat16, theirs Liger's", mine, theirs)


def attentions(on: Setting = ON_CUDA) -> Iterator[Case]:
    """Causal attention against torch's, with the kernel it chooses and with cuDNN's, and FlashAttention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from mindspeed_kernels.ops import npu_fusion_attention

    count, tokens = max(4, on.hidden // 256), on.tokens // 2
    for keys, width in ((count, 128), (count // 4, 128), (count // 2, 64)):
        tensors = tuple(on.random(tokens, 1, n, width) for n in (count, keys, keys))

        def native(q: Tensor, k: Tensor, v: Tensor, grouped: bool = keys != count) -> Tensor:
            attend = torch.nn.functional.scaled_dot_product_attention
            operands = (t.permute(1, 2, 0, 3) for t in (q, k, v))
            return attend(*operands, is_causal=True, enable_gqa=grouped).permute(2, 0, 1, 3)

        def cudnn(q: Tensor, k: Tensor, v: Tensor, native: Callable[..., Tensor] = native) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return native(q, k, v)

        def mine(q: Tensor, k: Tensor, v: Tensor, scale: float = width**-0.5) -> Tensor:
            context: Tensor = npu_fusion_attention(q, k, v, count, "SBND", scale=scale, sparse_mode=2)[0]
            return context

        ours, what = both_ways(mine, tensors), f"s={tokens} n={count} g={keys} d={width}"
        yield Case(f"attention bfloat16 {what}, theirs torch's", ours, both_ways(native, tensors))
        if on.device == "cuda":
            yield Case(f"attention bfloat16 {what}, theirs cuDNN's", ours, both_ways(cudnn, tensors))
        if on.has("flash_attn"):
            from flash_attn import flash_attn_func

            theirs = both_ways(
                lambda q, k, v: flash_attn_func(*(t.transpose(0, 1) for t in (q, k, v)), causal=True), tensors
            )
            yield Case(f"attention bfloat16 {what}, theirs FlashAttention's", ours, theirs)


def losses(on: Setting = ON_CUDA) -> Iterator[Case]:
    """Cross entropy of every token against torch's, compiled, and Liger's, which overwrites its input."""
    from mindspeed_kernels.ops import cross_entropy

    target = torch.arange(on.tokens, device=on.device) % on.vocabulary
    tensors = (on.random(on.tokens, on.vocabulary),)

    def native(x: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x.float(), target, reduction="none")

    ours = both_ways(lambda x: cross_entropy(x, target), tensors)
    yield Case("cross entropy bfloat16, theirs torch's", ours, both_ways(native, tensors))
    yield Case(
        "cross entropy bfloat16, theirs torch.compile's", ours, both_ways(on.compiled(native), tensors)
    )
    if on.has("liger_kernel"):
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        def liger(x: Tensor) -> Tensor:
            # Overwrites its input with the gradient, so every call gets one of its own.
            found: Tensor = LigerCrossEntropyFunction.apply(
                x.clone(), target, None, -100, 0.0, 0.0, "none", None, False
            )[0]
            return found

        yield Case("cross entropy bfloat16, theirs Liger's", ours, both_ways(liger, tensors))


CUDA_FAMILIES: dict[str, Callable[..., Iterator[Case]]] = {
    "norm": norms,
    "activation": activations,
    "rotary": rotations,
    "attention": attentions,
    "loss": losses,
}
"""Cases on a CUDA device, by name."""
