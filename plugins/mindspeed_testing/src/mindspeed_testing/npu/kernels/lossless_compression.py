"""Lossless compression of floating-point numbers, and memory of the host that the device addresses.

How exponents are laid out in the two parts of a compressed tensor is the kernel's own; here they are kept as
they are, which tells whether what was encoded is what is decoded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule, unwritten
from mindspeed_testing.npu.kernels.norms import OP_PLUGIN, sources
from mindspeed_testing.npu.kernels.rules import FLOATING

_OPS_MATH = ("ops-math", "c41933244c31e44fd496e3bb3212164f8c48c214", "2026-11-25")
_LEAST, _BLOCK, _HEAD, _TAIL = 32768, 64, 512, 8448
_VALUES = 256
_TRAINING = ("910B", "910_93")


def _named(call: Arguments) -> Arguments:
    """Return a call of the encoder with a name for each of its outputs."""
    parts = dict(zip(("pdf", "mantissa", "fixed", "var"), call["out"], strict=True))
    return Arguments({**call, **parts}, call.soc)


def _encoding(rule: Rule) -> Rule:
    """Return a rule for calls of the encoder."""
    return Rule(rule.text, lambda call: rule.holds(_named(call)), rule.socs)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _bound(count: int) -> int:
    """Return the bytes that exponents need at worst, on as many cores as the numbers can use."""
    return count + count // _BLOCK + _TAIL * (count // _LEAST) + _HEAD


def _of_one_dtype(names: str) -> Rule:
    def holds(call: Arguments) -> bool:
        kinds = {call[name].dtype for name in names.split()}
        return len(kinds) == 1 and kinds <= {*FLOATING}

    return Rule(f"{names} have one dtype, float16, bfloat16 or float32", holds)


def _numbers(name: str) -> Rule:
    return Rule(
        f"{name} has a multiple of 64 elements, 32768 or more",
        lambda a: a[name].numel() % _BLOCK == 0 and a[name].numel() >= _LEAST,
    )


def _mantissa(name: str) -> Rule:
    return Rule(
        f"mantissa has the bytes of {name} without one for each element",
        lambda a: _bytes(a["mantissa"]) == a[name].numel() * (a[name].element_size() - 1),
    )


_PDF = Rule(
    "pdf is int32 with 256 elements", lambda a: a["pdf"].dtype == torch.int32 and a["pdf"].numel() == _VALUES
)


_ROOM = Rule(
    "fixed and var have n + n / 64 + 8448 a core + 512 bytes together, fixed alone with reshuff",
    lambda a: _bytes(a["fixed"]) + (0 if a["reshuff"] else _bytes(a["var"])) >= _bound(a["input"].numel()),
)


def _planes(numbers: Tensor) -> Tensor:
    """Return the bytes ``[n, size]`` of numbers, the one with exponents last."""
    return numbers.detach().reshape(-1).contiguous().view(torch.uint8).view(numbers.numel(), -1)


def _fill(target: Tensor, values: Tensor) -> None:
    target.detach().view(-1).view(torch.uint8)[: values.numel()] = values


def _encode(given: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _named(given)
    planes = _planes(call["input"])
    exponents = planes[:, -1]
    if call["statistic"]:
        counts = torch.bincount(exponents.to(torch.int64), minlength=_VALUES)
        call["pdf"].view(-1).copy_(counts.to(torch.int32))
    # Codes are made of what pdf says occurs; another exponent has none.
    coded = call["pdf"].view(-1)[exponents.long()] > 0
    exponents = torch.where(coded, exponents, torch.full_like(exponents, 0xFF))
    _fill(call["mantissa"], planes[:, :-1].reshape(-1))
    room = _bytes(call["fixed"]) - _HEAD
    _fill(call["fixed"], torch.cat([exponents.new_zeros(_HEAD), exponents[:room]]))
    _fill(call["var"], exponents[room:])
    return call["pdf"], call["mantissa"], call["fixed"], call["var"]


def _decode(call: Arguments) -> Tensor:
    out: Tensor = call["out"]
    fixed, var = (call[name].reshape(-1).view(torch.uint8) for name in ("fixed", "var"))
    exponents = torch.cat([fixed[_HEAD:], var])[: out.numel()]
    mantissa = call["mantissa"].reshape(-1).view(torch.uint8).view(out.numel(), -1)
    _fill(out, torch.cat([mantissa, exponents[:, None]], 1).reshape(-1))
    return out


def _empty(call: Arguments) -> Tensor:
    return unwritten(torch.Size(call["size"]), call["dtype"] or torch.get_default_dtype())


KERNELS = (
    Kernel(
        "npu::npu_hans_encode.out",
        (
            _numbers("input"),
            _encoding(_of_one_dtype("input mantissa fixed var")),
            _encoding(_PDF),
            _encoding(_mantissa("input")),
            _encoding(Rule("fixed has 512 bytes or more", lambda a: _bytes(a["fixed"]) >= _HEAD)),
            _encoding(_ROOM),
        ),
        _encode,
        (
            *sources(
                _OPS_MATH,
                "math/hans_encode/op_host/hans_encode_tiling.cpp",
                "math/hans_encode/op_host/hans_encode_def.cpp",
                "math/hans_encode/docs/aclnnHansEncode.md",
            ),
            *sources(OP_PLUGIN, "op_plugin/config/op_plugin_functions.yaml"),
        ),
        differs=(
            "cores are those of the device, at most one for 32768 elements",
            "the layout of exponents in fixed and var is the kernel's own",
        ),
        socs=_TRAINING,
    ),
    Kernel(
        "npu::npu_hans_decode.out",
        (_of_one_dtype("mantissa fixed var out"), _PDF, _numbers("out"), _mantissa("out")),
        _decode,
        (
            *sources(
                _OPS_MATH,
                "math/hans_decode/op_host/hans_decode_tiling.cpp",
                "math/hans_decode/docs/aclnnHansDecode.md",
            ),
            *sources(OP_PLUGIN, "op_plugin/config/op_plugin_functions.yaml"),
        ),
        socs=_TRAINING,
    ),
    Kernel(
        "npu::empty_with_swapped_memory",
        (),
        _empty,
        sources(OP_PLUGIN, "docs/zh/custom_APIs/torch_npu/torch_npu-empty_with_swapped_memory.md"),
        unwritten="all of it",
        differs=("the memory is the host's; fill_, zero_, mul_ and few operations of the device take it",),
        socs=_TRAINING,
    ),
)
