"""Cases of `kernels.py`: our operator beside what megatron-core does without it, on equal tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from roofline import name_of
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Two ways to compute the same.

    Attributes:
        name: what, and how large.
        ours: a call of ours, forward and backward.
        theirs: the same without us.
        at_least: how many times faster ours has to be.
        at_most: how much of their extra memory ours may take.
        work: products, or bytes moved at least, of one call of ours.
        limit: ``"flop"`` or ``"bytes"``, what ``work`` counts.
        repeats: calls inside of ``ours`` and ``theirs``, for short ones.
        rounds: how often to take turns; short ones more often, since a busy machine disturbs them more.
        memory: whether the growth of the process is measured.
        dtype: of the products, for the rate they are held against.
        opaque: ours is compiled, so that its operations cannot be told apart.
    """

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    at_least: float | None = None
    at_most: float | None = None
    work: float = 0.0
    limit: str = "flop"
    repeats: int = 1
    rounds: int = 12
    memory: bool = True
    dtype: str = "float32"
    opaque: bool = False


def both_ways(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Callable[[], None]:
    """Forward and backward of a function with a gradient that is there already."""
    with torch.no_grad():
        gradient = torch.ones_like(function(*tensors))

    def run() -> None:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        function(*leaves).backward(gradient)

    return run


def megatron_attention(heads: int, width: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """megatron-core's plain causal attention."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    # It asks for the device of its buffers; there is none but the CPU. It keeps its mask for the next
    # layer, as is done here.
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * width,
        num_attention_heads=heads,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bf16=dtype == torch.bfloat16,
        sequence_parallel=False,
    )
    module = DotProductAttention(config, 1, AttnMaskType.causal, "self").eval()
    # Without dropout nothing is drawn, and no tracker of random states is set up.
    module.config.sequence_parallel = True
    masks: dict[int, Tensor] = {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        size = query.shape[0]
        if size not in masks:
            masks[size] = torch.ones(1, 1, size, size, dtype=torch.bool).triu_(1)
        return module(query, key, value, masks[size])

    return attend


def attention() -> Iterator[Case]:
    """Flash attention, and what attention with other masks and biases costs."""
    from mindspeed_kernels.attention.bias import alibi_slopes
    from mindspeed_kernels.ops import npu_fusion_attention, triangle_attention

    heads, width = 8, 64
    scale = width**-0.5
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        native = megatron_attention(heads, width, dtype)
        for size, speed, memory in ((1024, 2.5, 1 / 6), (2048, 3.5, 1 / 12), (4096, 4.0, 1 / 30)):
            tensors = tuple(torch.randn(size, 1, heads, width, dtype=dtype) for _ in range(3))
            flash = both_ways(
                lambda q, k, v: npu_fusion_attention(q, k, v, heads, "SBND", scale=scale, sparse_mode=2)[0],
                tensors,
            )
            exact = dtype == torch.float32
            # Two products forward and five backward, half of each below the diagonal.
            work = 7 * heads * size * size * width
            yield Case(
                f"flash attention {name} s={size}",
                flash,
                both_ways(native, tensors),
                speed if exact else None,
                memory if exact else None,
                work,
                rounds=3,
                dtype=name,
            )
            if not exact or size == 1024:
                continue
            slopes = torch.tensor(alibi_slopes(heads))
            yield Case(
                f"alibi {name} s={size}, theirs without bias",
                both_ways(
                    lambda q, k, v, s=slopes: npu_fusion_attention(
                        q, k, v, heads, "SBND", scale=scale, sparse_mode=2, pse=s, pse_type=2
                    )[0],
                    tensors,
                ),
                both_ways(native, tensors),
                2.0,
                1 / 4,
                rounds=3,
            )
            blocks = size // 512
            yield Case(
                f"triangle {name} s={size} block=512",
                both_ways(triangle_attention.backends["triangle"].function, tensors),
                both_ways(native, tensors),
                2.0,
                (blocks + 1) / (2 * blocks) * 1.15,
                rounds=3,
            )


def unfused_norm(x: Tensor, gamma: Tensor) -> Tensor:
    """RMSNorm as Megatron-LM composes it of torch operations."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return normed.type_as(x) * gamma


def norm() -> Iterator[Case]:
    """RMSNorm against the composition, and against torch's own."""
    from mindspeed_kernels.ops import rms_norm

    for dtype, speed in ((torch.float32, 2.0), (torch.bfloat16, 3.0)):
        name = str(dtype).removeprefix("torch.")
        tensors = torch.randn(2048, 1, 2048, dtype=dtype), torch.ones(2048, dtype=dtype)
        ours = both_ways(lambda x, g: rms_norm(x, g, 1e-5), tensors)
        # Read x and write y; then read x and dy and write dx.
        work = 5 * tensors[0].nbytes
        yield Case(f"rms norm {name}", ours, both_ways(unfused_norm, tensors), speed, None, work, "bytes")
        compiled = both_ways(lambda x, g: rms_norm.backends["compiled"].function(x, g, 1e-5), tensors)
        plain = both_ways(unfused_norm, tensors)
        yield Case(f"rms norm {name}, ours compiled", compiled, plain, None, None, work, "bytes", opaque=True)
        native = both_ways(lambda x, g: torch.nn.functional.rms_norm(x, (2048,), g, 1e-5), tensors)
        yield Case(f"rms norm {name}, theirs torch's", ours, native)


def activation() -> Iterator[Case]:
    """SwiGLU against megatron-core's composition and against its compiled form."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    from mindspeed_kernels.ops import swiglu

    def composed(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * value

    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        tensors = (torch.randn(2048, 8192, dtype=dtype),)
        # Read y, write half of it; then read y and half of it, and write dy.
        work = 4 * tensors[0].nbytes
        native = both_ways(lambda x: bias_swiglu_impl(x, None), tensors)
        compiled = both_ways(lambda x: swiglu.backends["compiled"].function(x), tensors)
        ours = both_ways(swiglu, tensors)
        # In bfloat16 the composition rounds three times where ours rounds once, and saves the conversions.
        bound = 1.0 if dtype == torch.float32 else None
        yield Case(
            f"swiglu {name}, theirs composed", ours, both_ways(composed, tensors), bound, None, work, "bytes"
        )
        yield Case(f"swiglu {name}, both compiled", compiled, native, 0.9, None, work, "bytes", opaque=True)


def softmax() -> Iterator[Case]:
    """The softmax of plain attention against megatron-core's composition."""
    from mindspeed_kernels.ops import scaled_masked_softmax

    def composed(x: Tensor) -> Tensor:
        hidden = torch.ones(x.shape[-2:], dtype=torch.bool).triu_(1)
        return torch.softmax((x.float() * 0.5).masked_fill(hidden, -10000.0), dim=-1).to(x.dtype)

    for dtype in (torch.float32, torch.bfloat16):
        tensors = (torch.randn(1, 8, 1024, 1024, dtype=dtype),)
        ours = both_ways(lambda x: scaled_masked_softmax(x, None, 0.5, True), tensors)
        yield Case(
            f"masked softmax {str(dtype).removeprefix('torch.')}", ours, both_ways(composed, tensors), 1.0
        )


def rotary() -> Iterator[Case]:
    """Rotary embedding against megatron-core's, which computes cosine and sine on every call."""
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    from mindspeed_kernels.ops import npu_rotary_position_embedding

    freqs = torch.randn(2048, 1, 1, 128)
    cos, sin = freqs.cos(), freqs.sin()
    for dtype, speed in ((torch.float32, None), (torch.bfloat16, 1.8)):
        tensors = (torch.randn(2048, 1, 16, 128, dtype=dtype),)
        ours = both_ways(lambda x: npu_rotary_position_embedding(x, cos, sin), tensors)
        theirs = both_ways(lambda x: _apply_rotary_pos_emb_bshd(x, freqs), tensors)
        name = f"rotary embedding {str(dtype).removeprefix('torch.')}"
        # Read x and write y; then read dy and write dx.
        work = 4 * tensors[0].nbytes
        yield Case(name, ours, theirs, speed, None, work, "bytes")
        call = npu_rotary_position_embedding.backends["compiled"].function
        compiled = both_ways(lambda x, call=call: call(x, cos, sin), tensors)
        yield Case(f"{name}, ours compiled", compiled, theirs, None, None, work, "bytes", opaque=True)


def grouped() -> Iterator[Case]:
    """Sixteen experts in one product, against one product each, and one padded to the longest."""
    from mindspeed_kernels.ops import grouped_matmul

    counts = torch.tensor([0, 300, 100, 112] * 4)
    ends, sizes = counts.cumsum(0), counts.tolist()
    for dtype in (torch.float32, torch.bfloat16):
        rows, weight = torch.randn(2048, 256, dtype=dtype), torch.randn(16, 256, 512, dtype=dtype)

        def looped(x: Tensor, w: Tensor) -> Tensor:
            return torch.cat([part @ matrix for part, matrix in zip(x.split(sizes), w, strict=True)])

        def padded(x: Tensor, w: Tensor) -> Tensor:
            whole = torch.nn.utils.rnn.pad_sequence(list(x.split(sizes)), batch_first=True)
            product = torch.bmm(whole, w)
            return torch.cat([part[:size] for part, size in zip(product, sizes, strict=True)])

        ours = both_ways(lambda x, w: grouped_matmul(x, w, ends), (rows, weight))
        name = f"grouped product {str(dtype).removeprefix('torch.')}"
        facts = {"work": 3 * 2048 * 256 * 512 * 2.0, "dtype": name_of(dtype)}
        yield Case(f"{name}, theirs looped", ours, both_ways(looped, (rows, weight)), 1.0, **facts)
        yield Case(f"{name}, theirs padded", ours, both_ways(padded, (rows, weight)), 1.0, **facts)


def accumulation() -> Iterator[Case]:
    """A weight gradient added to the main gradient in place, against one that is made first."""
    from mindspeed_kernels.ops import npu_matmul_add_fp32

    for dtype in (torch.float32, torch.bfloat16):
        x, dy = torch.randn(2048, 1024, dtype=dtype), torch.randn(2048, 4096, dtype=dtype)
        main = torch.zeros(4096, 1024)

        def separate(x: Tensor = x, dy: Tensor = dy, main: Tensor = main) -> None:
            main.add_(dy.t() @ x)

        def in_place(x: Tensor = x, dy: Tensor = dy, main: Tensor = main) -> None:
            npu_matmul_add_fp32(x, dy, main)

        exact = dtype == torch.float32
        yield Case(
            f"weight gradient {str(dtype).removeprefix('torch.')}",
            in_place,
            separate,
            1.0 if exact else None,
            0.5,
            2.0 * 2048 * 1024 * 4096,
            rounds=4,
        )


def dispatch() -> Iterator[Case]:
    """Time the choice of a backend per call: an operator that does nothing against the function itself."""
    from mindspeed_kernels.ops import rms_norm

    x, gamma = torch.randn(2, 8), torch.ones(8)

    def nothing(x: Tensor, gamma: Tensor, epsilon: float = 1e-6, zero_centered: bool = False) -> Any:
        return None

    backend = next(iter(rms_norm.backends.values()))
    rms_norm.add(type(backend)("rms_norm", "nothing", nothing, ("cpu",), priority=1000))
    repeats = 100_000

    def through(call: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(repeats):
                call(x, gamma, 1e-5, False)

        return run

    try:
        yield Case(
            "dispatch per call, theirs without",
            through(rms_norm),
            through(nothing),
            repeats=repeats,
            memory=False,
            opaque=True,
        )
    finally:
        rms_norm.remove("nothing")


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "dispatch": dispatch,
    "attention": attention,
    "norm": norm,
    "activation": activation,
    "softmax": softmax,
    "rotary": rotary,
    "grouped": grouped,
    "accumulation": accumulation,
}
"""Cases by name."""
