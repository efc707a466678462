"""The rotary operator on NPUs hands its kernel the layouts of angles that this knows, and no others."""

import sys
import types
from itertools import product

import pytest
import torch

from mindspeed_kernels.ops import OPERATORS
from mindspeed_kernels.ops.npu_rotary_position_embedding import npu_rotary_position_embedding_reference

SIZES = (5, 3, 2)


def kernel(x, cos, sin, rotary_mode="half"):
    """The kernel, which refuses angles that are of none of its layouts."""
    (a, b, c), leading = x.shape[:3], tuple(cos.shape[:3])
    assert leading == tuple(sin.shape[:3])
    allowed = {(1, 1, c), (1, b, 1), (a, 1, 1)}
    if rotary_mode == "half":
        allowed |= {(a, 1, c), (a, b, 1), (a, b, c)}
    assert leading in allowed, (rotary_mode, leading)
    return npu_rotary_position_embedding_reference(x, cos, sin, int(rotary_mode == "interleave"))


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("varies", list(product([False, True], repeat=3)))
def test_angles_of_every_shape_rotate_as_on_cpu(varies, mode, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", types.SimpleNamespace(npu_rotary_mul=kernel))
    torch.manual_seed(0)
    leading = [size if own else 1 for size, own in zip(SIZES, varies)]
    angles, x = torch.randn(*leading, 8), torch.randn(*SIZES, 8)
    found = []
    for function in (
        npu_rotary_position_embedding_reference,
        OPERATORS["npu_rotary_position_embedding"].backends["npu"].function,
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, angles.cos(), angles.sin())]
        result = function(*leaves, mode)
        result.square().sum().backward()
        found.append((result, *(leaf.grad for leaf in leaves)))
    for got, expected in zip(found[1], found[0]):
        torch.testing.assert_close(got, expected)
