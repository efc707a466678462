"""RMSNorm and LayerNorm of a sum, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule, Source, unwritten

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WITH_BF16 = ("910B", "910_93", "950")
_BEFORE_950 = ("310P", "910B", "910_93")
OPS_NN = ("ops-nn", "e5c3fa93", "2026-11-22")
OP_PLUGIN = ("op-plugin", "517f2e7d", "2026-11-22")


def sources(repository: tuple[str, str, str], *paths: str) -> tuple[Source, ...]:
    """Return the sources at paths of a repository, which is its name, commit and day of reading."""
    name, commit, day = repository
    return tuple(Source(name, path, commit, day) for path in paths)


def dtypes(names: str, allowed: Collection[tuple[torch.dtype, ...]], socs: tuple[str, ...]) -> Rule:
    """Return the rule that tensors have one of some combinations of dtypes.

    Args:
        names: arguments, separated by blanks; those that are not given are left out of the judgement.
        allowed: a dtype for each of them.
        socs: the generations that ask for it.
    """
    arguments = names.split()
    listed = ["/".join(str(d).removeprefix("torch.") for d in found) for found in allowed]
    text = f"{', '.join(arguments)} are {' or '.join(sorted(listed))}"

    def holds(call: Arguments) -> bool:
        given = [(index, call[name].dtype) for index, name in enumerate(arguments) if call[name] is not None]
        return any(all(found[index] == dtype for index, dtype in given) for found in allowed)

    return Rule(text, holds, socs)


def same(*kinds: torch.dtype, count: int) -> set[tuple[torch.dtype, ...]]:
    """Return the combinations of ``count`` equal dtypes."""
    return {(kind,) * count for kind in kinds}


def _axes(call: Arguments, x: str) -> bool:
    inner, outer = call["gamma"].shape, call[x].shape
    return 1 <= len(inner) <= len(outer) <= 8 and outer[len(outer) - len(inner) :] == inner


def _axes_rule(x: str) -> Rule:
    return Rule(
        f"gamma has the shape of the last dimensions of {x}, 8 dimensions at most", lambda a: _axes(a, x)
    )


def _not_empty(x: str, socs: tuple[str, ...]) -> Rule:
    return Rule(f"no dimension of {x} is 0", lambda a: a[x].numel() > 0, socs)


def _normed(call: Arguments) -> list[int]:
    return list(range(-call["gamma"].dim(), 0))


_RMS_PAIRS = {(FP16, FP32), (BF16, FP32), (FP16, FP16), (FP32, FP32), (BF16, BF16)}


def _rms_norm(call: Arguments) -> tuple[Tensor, Tensor]:
    x = call["input"].double()
    rstd = (x.square().mean(_normed(call), keepdim=True) + call["epsilon"]).rsqrt()
    return (x * rstd * call["gamma"].double()).to(call["input"].dtype), rstd.float()


def _rms_norm_backward(call: Arguments) -> tuple[Tensor, Tensor]:
    x, gamma, dy = (call[name].double() for name in ("input", "gamma", "dy"))
    axes = _normed(call)
    rstd = call["rstd"].double().reshape([*x.shape[: x.dim() - gamma.dim()], *[1] * gamma.dim()])
    unit = x * rstd
    inner = dy * gamma
    dx = rstd * (inner - unit * (inner * unit).mean(axes, keepdim=True))
    outer = list(range(x.dim() - gamma.dim()))
    dgamma = (dy * unit).sum(outer) if outer else dy * unit
    return dx.to(call["input"].dtype), dgamma.float()


_ADD_GROUPS = {
    *((a, b, FP32, FP32) for a in (FP16, BF16) for b in (a, FP32)),
    *((FP32, b, FP32, FP32) for b in (FP16, BF16, FP32)),
    *((a, a, a, a) for a in (FP16, BF16)),
}


def _add_layer_norm(call: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x1, x2 = call["x1"], call["x2"]
    dtype = x1.dtype if x1.dtype == x2.dtype else FP32
    total = x1.double() + x2.double()
    axes = _normed(call)
    mean = total.mean(axes, keepdim=True)
    rstd = (total.var(axes, correction=0, keepdim=True) + call["epsilon"]).rsqrt()
    y = (total - mean) * rstd * call["gamma"].double() + call["beta"].double()
    kept = total.to(dtype) if call["additional_output"] else unwritten(total.shape, dtype)
    statistics = [mean.float(), rstd.float()]
    if call.soc == "310P":
        statistics = [unwritten(mean.shape, FP32), unwritten(mean.shape, FP32)]
    return (y.to(dtype), *statistics, kept)


def _add_layer_norm_backward(call: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x1 = call["x1"]
    total = x1.double() + call["x2"].double()
    dy = torch.zeros_like(total) if call["dy_opt"] is None else call["dy_opt"].double()
    rstd, mean = call["rstd"].double(), call["mean"].double()
    unit = (total - mean) * rstd
    inner = dy * call["gamma"].double()
    dx = rstd * (inner - inner.mean(-1, keepdim=True) - unit * (inner * unit).mean(-1, keepdim=True))
    if call["dsum_opt"] is not None:
        dx = dx + call["dsum_opt"].double()
    outer = list(range(total.dim() - 1))
    dgamma, dbeta = ((dy * unit).sum(outer), dy.sum(outer)) if outer else (dy * unit, dy)
    return dx.to(x1.dtype), dx.to(x1.dtype), dgamma.float(), dbeta.float()


def _same_shapes(*names: str) -> Callable[[Arguments], bool]:
    def holds(call: Arguments) -> bool:
        return len({call[name].shape for name in names if call[name] is not None}) == 1

    return holds


KERNELS = (
    Kernel(
        "npu::npu_rms_norm",
        (
            dtypes("input gamma", _RMS_PAIRS, WITH_BF16),
            dtypes("input gamma", same(FP16, FP32, count=2), ("310P",)),
            _axes_rule("input"),
            _not_empty("input", _BEFORE_950),
            Rule("gamma has elements", lambda a: a["gamma"].numel() > 0),
            Rule("epsilon is not negative", lambda a: a["epsilon"] >= 0),
        ),
        _rms_norm,
        (
            *sources(
                OPS_NN,
                "norm/rms_norm/op_host/rms_norm_def.cpp",
                "norm/rms_norm/op_host/rms_norm_tiling.cpp",
                "norm/rms_norm/docs/aclnnRmsNorm.md",
            ),
            *sources(OP_PLUGIN, "op_plugin/ops/opapi/RmsNormKernelOpApi.cpp"),
        ),
        differs=("epsilon is 1e-6", "a float32 weight goes with half inputs, a half weight not with float32"),
    ),
    Kernel(
        "npu::npu_rms_norm_backward",
        (
            dtypes("dy input gamma rstd", {(x, x, g, FP32) for x, g in _RMS_PAIRS}, WITH_BF16),
            dtypes("dy input gamma rstd", {(x, x, x, FP32) for x in (FP16, FP32)}, ("310P",)),
            _axes_rule("input"),
            Rule("dy has the shape of input", _same_shapes("dy", "input")),
            Rule(
                "the last dimension has 32 bytes or more",
                lambda a: a["input"].shape[-1] * a["input"].element_size() >= 32,
                ("310P",),
            ),
            _not_empty("input", _BEFORE_950),
        ),
        _rms_norm_backward,
        (
            *sources(
                OPS_NN,
                "norm/rms_norm_grad/op_host/rms_norm_grad_def.cpp",
                "norm/rms_norm_grad/op_host/rms_norm_grad_tiling.cpp",
                "norm/rms_norm_grad/docs/aclnnRmsNormGrad.md",
            ),
            *sources(OP_PLUGIN, "op_plugin/ops/opapi/RmsNormBackwardKernelOpApi.cpp"),
        ),
        differs=("the gradient of gamma is float32",),
    ),
    Kernel(
        "npu::npu_add_layer_norm",
        (
            dtypes("x1 x2 gamma beta", _ADD_GROUPS, WITH_BF16),
            dtypes("x1 x2 gamma beta", same(FP16, FP32, count=4), ("310P",)),
            Rule("x1 and x2 have one shape", _same_shapes("x1", "x2")),
            Rule("gamma and beta have one shape", _same_shapes("gamma", "beta")),
            _axes_rule("x1"),
            Rule("gamma has one dimension", lambda a: a["gamma"].dim() == 1),
            _not_empty("x1", ("310P", "910B", "910_93", "950")),
        ),
        _add_layer_norm,
        (
            *sources(
                OPS_NN,
                "norm/add_layer_norm/op_host/add_layer_norm_def.cpp",
                "norm/add_layer_norm/docs/aclnnAddLayerNorm.md",
            ),
            *sources(OP_PLUGIN, "op_plugin/ops/opapi/AddLayerNormKernelNpuOpApi.cpp"),
        ),
        unwritten="the sum, without additional_output; mean and rstd on 310P",
        differs=("summands of two dtypes give float32 results",),
    ),
    Kernel(
        "npu::npu_add_layer_norm_backward",
        (
            dtypes("x1 x2 gamma dy_opt dsum_opt", same(FP16, FP32, BF16, count=5), WITH_BF16),
            dtypes("x1 x2 gamma dy_opt dsum_opt", same(FP16, FP32, count=5), ("310P",)),
            Rule("dy and dsum have the shape of x1 and x2", _same_shapes("x1", "x2", "dy_opt", "dsum_opt")),
            _not_empty("x1", ("310P", "910B", "910_93", "950")),
        ),
        _add_layer_norm_backward,
        (
            *sources(
                OPS_NN,
                "norm/add_layer_norm_grad/op_host/add_layer_norm_grad_def.cpp",
                "norm/add_layer_norm_grad/docs/aclnnAddLayerNormGrad.md",
            ),
            *sources(OP_PLUGIN, "op_plugin/ops/opapi/AddLayerNormBackwardKernelNpuOpApi.cpp"),
        ),
        differs=("gamma has the dtype of x1, although the forward takes a float32 one beside half inputs",),
    ),
)
