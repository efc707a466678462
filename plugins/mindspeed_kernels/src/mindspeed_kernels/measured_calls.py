"""Calls of the operators in the sizes of a layer, for measurements of a device.

A model of width 4096 with 32 heads, 8192 tokens at a time, eight experts of width 1408; with ``small`` sizes
that show nothing but that the call works, on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class MeasuredCall:
    """Arguments of a call.

    Attributes:
        args: positional arguments.
        options: the others.
        leaves: the tensors whose gradients belong to the measurement; empty for a forward pass alone.
    """

    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    leaves: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """The place of the tensors, and the choice between sizes of a layer and small ones.

    Attributes:
        device: type of the device.
        small: take the small ones.
        group: all ranks, for operators that communicate.
        alone: this rank by itself.
    """

    device: str
    small: bool
    group: ProcessGroup | None = None
    alone: ProcessGroup | None = None

    def pick(self, layer: int, small: int) -> int:
        """Return one of two sizes."""
        return small if self.small else layer

    def numbers(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return random numbers."""
        return torch.randn(shape, device=self.device).to(dtype)

    def bytes(self, *shape: int) -> Tensor:
        """Return random int8 numbers."""
        return torch.randint(-9, 10, shape, dtype=torch.int8, device=self.device)

    @property
    def ranks(self) -> int:
        """Return the size of the group."""
        return self.group.size() if self.group is not None else 1


Make = Callable[[Sizes], MeasuredCall]
CALLS: dict[str, Make] = {}
"""A call of each operator that needs no other rank, by its name."""
BETWEEN_RANKS: dict[str, Make] = {}
"""A call of each operator that communicates, for every rank of a group of two or more."""


def _of(name: str, calls: dict[str, Make] = CALLS) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        calls[name] = make
        return make

    return add


def _differentiated(*args: Any, **options: Any) -> MeasuredCall:
    """Return a call with the gradients of every floating tensor among ``args``."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    return MeasuredCall(args, options, tuple(tensor for tensor in tensors if tensor.is_floating_point()))


@_of("rms_norm")
def _rms_norm(sizes: Sizes) -> MeasuredCall:
    width = sizes.pick(4096, 16)
    return _differentiated(sizes.numbers(sizes.pick(8192, 4), width), sizes.numbers(width))


@_of("swiglu")
def _swiglu(sizes: Sizes) -> MeasuredCall:
    return _differentiated(sizes.numbers(sizes.pick(8192, 4), sizes.pick(22016, 32)))


@_of("cross_entropy")
def _cross_entropy(sizes: Sizes) -> MeasuredCall:
    rows, vocabulary = sizes.pick(8192, 4), sizes.pick(32000, 32)
    target = torch.randint(vocabulary, (rows,), device=sizes.device)
    return _differentiated(sizes.numbers(rows, vocabulary), target)


@_of("scaled_masked_softmax")
def _softmax(sizes: Sizes) -> MeasuredCall:
    length = sizes.pick(2048, 32)
    return _differentiated(sizes.numbers(1, sizes.pick(32, 2), length, length), fixed_triu_mask=True)


@_of("npu_dropout_add_layer_norm")
@_of("npu_dropout_add_rms_norm")
def _dropout_add_norm(sizes: Sizes) -> MeasuredCall:
    shape = sizes.pick(2, 2), sizes.pick(4096, 3), sizes.pick(4096, 16)
    x0, residual, weight = sizes.numbers(*shape), sizes.numbers(*shape), sizes.numbers(shape[-1])
    return _differentiated(x0, residual, weight, None, 0.0, 1e-5)


@_of("npu_rotary_position_embedding")
def _rotary(sizes: Sizes) -> MeasuredCall:
    length, heads, width = sizes.pick(4096, 16), sizes.pick(32, 2), sizes.pick(128, 8)
    angles = torch.randn(length, 1, 1, width, device=sizes.device)
    tables = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    x = sizes.numbers(length, 1, heads, width)
    return MeasuredCall((x, *tables), leaves=(x,))


def _attended(sizes: Sizes) -> tuple[tuple[Tensor, Tensor, Tensor], int, dict[str, Any]]:
    """Return three tensors ``[s, b, n * d]``, their heads, and the options of a causal mask."""
    length, heads, width = sizes.pick(4096, 16), sizes.pick(32, 2), sizes.pick(128, 8)
    query, key, value = (sizes.numbers(length, 1, heads * width) for _ in range(3))
    side = min(length, 2048)
    mask = torch.ones(side, side, dtype=torch.bool, device=sizes.device).triu(1)
    return (query, key, value), heads, {"sparse_mode": 0 if sizes.small else 2, "atten_mask": mask}


@_of("npu_fusion_attention")
def _attention(sizes: Sizes) -> MeasuredCall:
    tensors, heads, options = _attended(sizes)
    scale = (tensors[0].shape[-1] // heads) ** -0.5
    return _differentiated(*tensors, heads, "SBH", scale=scale, **options)


@_of("npu_fusion_attention_grad")
def _attention_grad(sizes: Sizes) -> MeasuredCall:
    from mindspeed_kernels.ops import npu_fusion_attention

    tensors, heads, options = _attended(sizes)
    scale = (tensors[0].shape[-1] // heads) ** -0.5
    context, highest, total = npu_fusion_attention(*tensors, heads, "SBH", scale=scale, **options)[:3]
    options |= {"softmax_max": highest, "softmax_sum": total, "attention_in": context, "scale_value": scale}
    return MeasuredCall((*tensors, torch.randn_like(context), heads, "SBH"), options)


@_of("npu_ring_attention_update")
def _ring_update(sizes: Sizes) -> MeasuredCall:
    length, heads, width = sizes.pick(4096, 64), sizes.pick(32, 2), sizes.pick(128, 64)

    def block() -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.randn(2, 1, heads, length, 1, device=sizes.device).expand(-1, -1, -1, -1, 8)
        return sizes.numbers(length, 1, heads * width), rows[0].contiguous(), rows[1].exp()

    return MeasuredCall((*block(), *block()))


@_of("triangle_attention")
def _triangle(sizes: Sizes) -> MeasuredCall:
    shape = sizes.pick(4096, 16), 1, sizes.pick(32, 2), sizes.pick(128, 8)
    return _differentiated(*(sizes.numbers(*shape) for _ in range(3)))


@_of("npu_lightning_indexer")
def _indexer(sizes: Sizes) -> MeasuredCall:
    length, heads, width = sizes.pick(2048, 4), sizes.pick(64, 8), 128
    query, key = sizes.numbers(1, length, heads, width), sizes.numbers(1, length, 1, width)
    weights = sizes.numbers(1, length, heads)
    return _differentiated(query, key, weights, sparse_count=sizes.pick(1024, 4))


@_of("npu_sparse_lightning_indexer_grad_kl_loss")
def _indexer_loss(sizes: Sizes) -> MeasuredCall:
    length, heads, count = sizes.pick(2048, 2), 32, 1024
    query, key = sizes.numbers(length, 1, heads, 512), sizes.numbers(length, 1, 512)
    index = sizes.numbers(length, 1, 8, 128), sizes.numbers(length, 1, 1, 128), sizes.numbers(length, 1, 8)
    places = torch.arange(count, dtype=torch.int32, device=sizes.device).expand(1, length, -1).clone()
    # A query sees the keys up to its own place.
    seen = torch.arange(length, device=sizes.device).view(1, -1, 1)
    places = places.masked_fill(places > seen, -1)
    highest, total = (torch.full((1, 1, length, heads), value, device=sizes.device) for value in (0.5, 3.0))
    rope = {"query_rope": sizes.numbers(length, 1, heads, 64), "key_rope": sizes.numbers(length, 1, 1, 64)}
    return MeasuredCall((query, key, *index, places, highest, total, 0.01), rope, leaves=index)


def _expert_rows(sizes: Sizes, least: int = 16) -> tuple[int, int, int, int, list[int]]:
    """Return experts, rows, width of rows and of products, and the ends of each expert's rows."""
    experts, rows = sizes.pick(8, 2), sizes.pick(8192, 8)
    ends = [number * (rows // experts) for number in range(1, experts + 1)]
    return experts, rows, sizes.pick(4096, least), sizes.pick(1408, least), ends


def _products(sizes: Sizes, least: int) -> MeasuredCall:
    experts, rows, inner, columns, ends = _expert_rows(sizes, least)
    x, weight = sizes.numbers(rows, inner), sizes.numbers(experts, inner, columns)
    return _differentiated(x, weight, torch.tensor(ends, device=sizes.device))


@_of("grouped_matmul")
def _grouped(sizes: Sizes) -> MeasuredCall:
    return _products(sizes, 16)


@_of("mx_grouped_matmul")
def _mx_grouped(sizes: Sizes) -> MeasuredCall:
    # Blocks of 32 numbers have a scale together, by pairs.
    return _products(sizes, 64)


@_of("npu_groupmatmul_add_fp32")
def _grouped_add(sizes: Sizes) -> MeasuredCall:
    experts, rows, inner, columns, ends = _expert_rows(sizes)
    total = sizes.numbers(experts, inner, columns, dtype=torch.float32)
    return MeasuredCall((sizes.numbers(rows, inner), sizes.numbers(rows, columns), ends, total))


@_of("npu_matmul_add_fp32")
def _add(sizes: Sizes) -> MeasuredCall:
    rows, inner, columns = sizes.pick(8192, 16), sizes.pick(4096, 16), sizes.pick(11008, 32)
    total = sizes.numbers(columns, inner, dtype=torch.float32)
    return MeasuredCall((sizes.numbers(rows, inner), sizes.numbers(rows, columns), total))


@_of("quant_grouped_matmul")
def _quantized(sizes: Sizes) -> MeasuredCall:
    experts, rows, inner, columns, ends = _expert_rows(sizes)
    scales = (sizes.numbers(*shape, dtype=torch.float32) for shape in ((experts, columns), (rows,)))
    by_expert, by_token = scales
    numbers = sizes.bytes(rows, inner), sizes.bytes(experts, inner, columns)
    return MeasuredCall((*numbers, by_expert, torch.tensor(ends, device=sizes.device), by_token))


@_of("weight_quant_grouped_matmul")
def _weight_quantized(sizes: Sizes) -> MeasuredCall:
    experts, rows, inner, columns, ends = _expert_rows(sizes)
    scale, offset = sizes.numbers(experts, columns), sizes.numbers(experts, columns)
    numbers = sizes.numbers(rows, inner), sizes.bytes(experts, inner, columns)
    return MeasuredCall((*numbers, scale, offset, torch.tensor(ends, device=sizes.device)))


@_of("npu_ffn")
def _ffn(sizes: Sizes) -> MeasuredCall:
    # For inference: its kernel has no backward.
    rows, width, inner = sizes.pick(8192, 16), sizes.pick(4096, 16), sizes.pick(11008, 32)
    return MeasuredCall(
        (sizes.numbers(rows, width), sizes.numbers(width, inner), sizes.numbers(inner, width), "gelu")
    )


def _routed(sizes: Sizes) -> tuple[Tensor, Tensor, int]:
    """Return tokens ``[T, h]``, the experts of each ``[T, k]`` and the number of experts."""
    tokens, experts, chosen = sizes.pick(8192, 4), sizes.pick(64, 4), sizes.pick(8, 2)
    first = torch.randint(experts, (tokens, 1), device=sizes.device)
    indices = (first + torch.arange(chosen, device=sizes.device)) % experts
    return sizes.numbers(tokens, sizes.pick(4096, 16)), indices, experts


def _map(indices: Tensor, experts: int) -> Tensor:
    empty = torch.zeros(indices.shape[0], experts, dtype=torch.bool, device=indices.device)
    return empty.scatter(1, indices, True)


@_of("npu_moe_token_permute")
def _permute(sizes: Sizes) -> MeasuredCall:
    tokens, indices, _ = _routed(sizes)
    return _differentiated(tokens, indices)


@_of("npu_moe_token_unpermute")
def _unpermute(sizes: Sizes) -> MeasuredCall:
    from mindspeed_kernels.ops import npu_moe_token_permute

    tokens, indices, _ = _routed(sizes)
    rows, where = npu_moe_token_permute(tokens, indices)
    return _differentiated(rows, where, sizes.numbers(*indices.shape))


@_of("npu_moe_token_permute_with_routing_map")
def _permute_map(sizes: Sizes) -> MeasuredCall:
    tokens, indices, experts = _routed(sizes)
    options = {"probs": sizes.numbers(len(tokens), experts), "num_out_tokens": indices.numel()}
    return _differentiated(tokens, _map(indices, experts), **options)


@_of("npu_moe_token_unpermute_with_routing_map")
def _unpermute_map(sizes: Sizes) -> MeasuredCall:
    from mindspeed_kernels.ops import npu_moe_token_permute_with_routing_map

    tokens, indices, experts = _routed(sizes)
    routing_map = _map(indices, experts)
    rows, _, where = npu_moe_token_permute_with_routing_map(
        tokens, routing_map, num_out_tokens=indices.numel()
    )
    options = {"probs": sizes.numbers(len(tokens), experts), "routing_map": routing_map}
    return _differentiated(rows, where, tuple(tokens.shape), **options)


def _parts(sizes: Sizes) -> tuple[int, int, int]:
    """Return rows, the width of rows and of products of a linear that is cut over the ranks."""
    # Kernels with built-in communication sum over 256 numbers at least.
    return sizes.pick(8192, 8), sizes.pick(4096 // sizes.ranks, 256), sizes.pick(4096, 32)


@_of("matmul_all_reduce", BETWEEN_RANKS)
@_of("matmul_reduce_scatter", BETWEEN_RANKS)
def _summed(sizes: Sizes) -> MeasuredCall:
    rows, inner, columns = _parts(sizes)
    return _differentiated(sizes.numbers(rows, inner), sizes.numbers(inner, columns), None, sizes.group)


@_of("all_gather_matmul", BETWEEN_RANKS)
def _gathered(sizes: Sizes) -> MeasuredCall:
    width = sizes.pick(4096, 256)
    x = sizes.numbers(sizes.pick(8192 // sizes.ranks, 8), width)
    weight = sizes.numbers(width, sizes.pick(4096 // sizes.ranks, 32))
    return _differentiated(x, weight, None, sizes.group)


def _with_norm(sizes: Sizes) -> tuple[Any, ...]:
    rows, inner, columns = _parts(sizes)
    x, weight = sizes.numbers(1, rows, inner), sizes.numbers(inner, columns)
    return x, weight, sizes.numbers(1, rows, columns), sizes.numbers(columns), sizes.group


@_of("npu_mm_all_reduce_add_rms_norm", BETWEEN_RANKS)
def _summed_norm(sizes: Sizes) -> MeasuredCall:
    return _differentiated(*_with_norm(sizes))


@_of("npu_mm_all_reduce_add_rms_norm_", BETWEEN_RANKS)
def _summed_norm_in_place(sizes: Sizes) -> MeasuredCall:
    return MeasuredCall(_with_norm(sizes))


@_of("npu_grouped_mat_mul_all_reduce", BETWEEN_RANKS)
def _summed_groups(sizes: Sizes) -> MeasuredCall:
    rows, inner, columns = _parts(sizes)
    xs, weights = [sizes.numbers(rows, inner)] * 2, [sizes.numbers(inner, columns)] * 2
    return MeasuredCall((xs, weights, sizes.group), {"split_item": 0})


def _exchanged(sizes: Sizes) -> tuple[int, int, int, Sequence[int]]:
    """Return rows, the width of rows and of products, and rows of each expert of each rank."""
    experts = 2
    share = sizes.pick(8192, 16) // (experts * sizes.ranks)
    counts = [share] * experts * sizes.ranks
    return sum(counts), sizes.pick(4096, 256), sizes.pick(1408, 256), counts


@_of("all2all_grouped_matmul", BETWEEN_RANKS)
@_of("grouped_matmul_all2all", BETWEEN_RANKS)
def _exchanged_rows(sizes: Sizes) -> MeasuredCall:
    rows, inner, columns, counts = _exchanged(sizes)
    x, weights = sizes.numbers(rows, inner), sizes.numbers(2, inner, columns)
    return _differentiated(x, weights, sizes.group, counts, counts)


@_of("npu_alltoall_allgather_bmm", BETWEEN_RANKS)
def _to_experts(sizes: Sizes) -> MeasuredCall:
    rows, inner, columns, _ = _exchanged(sizes)
    experts = 2 * sizes.ranks
    x, weight = sizes.numbers(experts, rows // experts, inner), sizes.numbers(2, inner, columns)
    return _differentiated(x, weight, sizes.group, sizes.ranks, sizes.alone, 1)


@_of("npu_bmm_reducescatter_alltoall", BETWEEN_RANKS)
def _from_experts(sizes: Sizes) -> MeasuredCall:
    rows, inner, columns, _ = _exchanged(sizes)
    x, weight = sizes.numbers(2, rows // 2, columns), sizes.numbers(2, columns, inner)
    return _differentiated(x, weight, sizes.group, sizes.ranks, sizes.alone, 1)
