"""The gradient of ``gather``, which torch_npu puts in the place of PyTorch's own."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule
from mindspeed_testing.npu.kernels.repositories import op_plugin
from mindspeed_testing.npu.kernels.rules import off


def gather_backward(a: Arguments) -> Tensor:
    """Return ``self_size`` zeros, each number of ``grad`` added where it was gathered from."""
    grad, index, dim = a["grad"], a["index"], a["dim"]
    total = torch.zeros(a["self_size"], dtype=torch.float64)
    if not total.dim():
        return (total + grad.double().sum()).to(grad.dtype)
    # Every position of the index, but for the gathered dimension that of the number itself.
    places = list(torch.meshgrid(*(torch.arange(size) for size in index.shape), indexing="ij"))
    places[dim] = index.long()
    total.index_put_(tuple(places), grad.double(), accumulate=True)
    return total.to(grad.dtype)


KERNELS = (
    Kernel(
        "npu::npu_gather_backward",
        rules=(
            off("sparse_grad"),
            Rule("index is int64 or int32", lambda a: a["index"].dtype in (torch.int64, torch.int32)),
            Rule("grad has the shape of index", lambda a: a["grad"].shape == a["index"].shape),
            Rule(
                "index has as many dimensions as what was gathered from",
                lambda a: a["index"].dim() == len(a["self_size"]),
            ),
        ),
        compute=gather_backward,
        sources=(
            op_plugin("op_plugin/ops/opapi/GatherBackwardKernelNpuOpApi.cpp"),
            op_plugin("op_plugin/config/derivatives.yaml"),
        ),
        differs=("numbers that were gathered more than once are added in no fixed order",),
    ),
)
