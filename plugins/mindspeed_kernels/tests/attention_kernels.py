"""Attention's NPU branch on the device's kernels as their contracts state them, with tensors on CPU."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from mindspeed_kernels import ops
from mindspeed_kernels.ops import npu_fusion_attention
from mindspeed_kernels.ops.fusion_attention import logsum_of
from mindspeed_testing.npu.stand_in import kernels_on_cpu

SCHEMAS = Path(__file__).resolve().parents[3] / "tests" / "npu_conformance" / "schemas.json"
OPERATORS = ("npu_fusion_attention", "npu_fusion_attention_grad", "npu_ring_attention_update")


@contextmanager
def attention_kernels(soc="910B"):
    """Serve attention's operators by their NPU backends; yields how often each kernel ran."""
    with kernels_on_cpu(SCHEMAS, soc) as calls:
        for name in OPERATORS:
            operator = ops.OPERATORS[name]
            served = replace(operator.backends["npu"], name="kernels", devices=("cpu",), available=str)
            operator.add(served)
        try:
            with ops.use(**dict.fromkeys(OPERATORS, "kernels")):
                yield calls
        finally:
            for name in OPERATORS:
                ops.OPERATORS[name].remove("kernels")


UNLIMITED = 2147483647
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 0.12, torch.float16: 0.02}


def tensors(shape, dtype=torch.float32, seed=0):
    """Queries, keys and values ``[b, n | g, s, d]`` of ``(b, n, g, sq, sk, d, dv)``."""
    b, n, g, sq, sk, d, dv = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = (b, n, sq, d), (b, g, sk, d), (b, g, sk, dv)
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def in_layout(tensor, layout):
    """``[b, n, s, d]`` in a layout; packed sequences have one sample."""
    if layout == "TND":
        return tensor[0].transpose(0, 1).contiguous()
    order = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "SBND": (2, 0, 1, 3)}
    order |= {"BSH": order["BSND"], "SBH": order["SBND"]}
    laid = tensor.permute(order[layout])
    return (laid.flatten(2) if layout in ("BSH", "SBH") else laid).contiguous()


def run(inputs, heads, layout, options):
    """Context, logarithm of the sums, and gradients of queries, keys, values and the sink."""
    leaves = [in_layout(tensor, layout).requires_grad_() for tensor in inputs]
    sink = options.get("sink")
    given = dict(options)
    if sink is not None:
        given["sink"] = sink.clone().requires_grad_()
    result = npu_fusion_attention(*leaves, heads, layout, **given)
    generator = torch.Generator().manual_seed(7)
    outer = torch.randn(result[0].shape, generator=generator).to(result[0].dtype)
    result[0].backward(outer)
    found = [result[0].detach(), logsum_of(result[1].double(), result[2].double()).detach()]
    found += [leaf.grad for leaf in leaves]
    return found + ([] if sink is None else [given["sink"].grad])


def compare(inputs, heads, layout, options, soc="910B"):
    """The NPU branch against CPU, on float64 there; returns how often kernels ran."""
    dtype = inputs[0].dtype
    wide = {
        name: value.double() if name in ("pse", "sink") and value is not None else value
        for name, value in options.items()
    }
    expected = run([tensor.double() for tensor in inputs], heads, layout, wide)
    with attention_kernels(soc) as calls:
        got = run(inputs, heads, layout, options)
    for index, (one, other) in enumerate(zip(got, expected)):
        limit = TOLERANCES[dtype] * max(1.0, float(other.nan_to_num(posinf=0.0).abs().max()))
        if index == 1:
            assert torch.equal(one.isinf(), other.isinf())
            one, other = one.nan_to_num(posinf=0.0), other.nan_to_num(posinf=0.0)
        difference = (one.double() - other.double()).abs().max() if one.numel() else torch.zeros(())
        assert float(difference) <= limit, (index, float(difference), layout, options)
    return calls
