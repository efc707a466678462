"""Triton kernels on CPU, run by its interpreter in a process of its own: ``python triton_cases.py``.

Prints one JSON object: the largest error of every case over what is allowed, or what went wrong.
"""

import json
import os
import traceback
from importlib.util import find_spec

FLOATS = ("float32", "bfloat16", "float16")
OPERATORS = ("rms_norm", "swiglu", "npu_rotary_position_embedding", "cross_entropy")
TABLES = {
    "a token": (7, 1, 1),
    "a sample": (1, 2, 1),
    "a head": (1, 1, 9),
    "tokens and samples": (7, 2, 1),
    "everything": (7, 2, 9),
    "nothing": (1, 1, 1),
}
"""Sizes of the angles for an input of 7 tokens, 2 samples and 9 heads, by what they depend on."""
CASES = (
    *(f"{name}: samples in {dtype}" for name in OPERATORS for dtype in FLOATS),
    *(f"rotation of {mode} by angles of {what}" for mode in ("halves", "pairs") for what in TABLES),
    *(f"norm of wide rows, {kind}" for kind in ("plain", "zero-centred", "float32 scale")),
    "swiglu of wide rows that lie apart",
    "cross entropy of many blocks",
    "cross entropy of a part of the vocabulary",
    "cross entropy of logits that are minus infinity",
    "rotation where angles learn",
    "every kernel was run",
)
LIGER = tuple(
    f"Liger-Kernel's {kind} in {dtype}"
    for kind in ("swiglu", "norm", "zero-centred norm")
    for dtype in ("float32", "float16")
    if find_spec("liger_kernel")
)
"""Cases of the backend ``liger``, where the package is installed: every kernel of it that we call."""
# Triton's interpreter cuts the digits that do not fit into 16 bits, where a device rounds.
ALLOWED = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


def case(name):
    import torch

    from mindspeed_kernels.conformance import check_backend
    from mindspeed_kernels.device_kernels import rms_norm
    from mindspeed_kernels.ops import OPERATORS as OPS

    def compared(operator, tensors, options=(), dtype="float32", backend="triton"):
        """Compare result and gradients with the reference, relative to their size."""
        found = []
        for one in (backend, "reference"):
            leaves = [
                tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors
            ]
            shaped = [leaf if index else view(leaf) for index, leaf in enumerate(leaves)]
            result = OPS[operator].backends[one].function(*shaped, *options)
            torch.manual_seed(1)
            result.backward(torch.randn(result.shape).to(result))
            found.append([result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
        mine, other = found
        assert len(mine) == len(other), "a gradient is missing"
        for one, two in zip(mine, other):
            assert one.shape == two.shape
            assert one.dtype == two.dtype
            error = float((one.double() - two.double()).norm() / (two.double().norm() + 1e-30))
            assert error <= ALLOWED[dtype], f"an error of {error:.3g}"

    def view(tensor):
        return tensor

    torch.manual_seed(0)
    if ": samples in " in name:
        operator, _, dtype = name.partition(": samples in ")
        assert check_backend(operator, "triton", dtype=getattr(torch, dtype)) > 0
    elif name.startswith("rotation of "):
        mode, _, what = name.removeprefix("rotation of ").partition(" by angles of ")
        angles = torch.randn(*TABLES[what], 12)
        # Heads that are part of a wider projection, and samples behind heads.
        x = torch.randn(7, 9, 2, 16).bfloat16()

        def view(tensor):
            return tensor[..., :12].transpose(1, 2)

        compared(
            "npu_rotary_position_embedding",
            (x, angles.cos(), angles.sin()),
            (int(mode == "pairs"),),
            "bfloat16",
        )
    elif name == "rotation where angles learn":
        angles = torch.randn(7, 1, 1, 12)
        compared("npu_rotary_position_embedding", (torch.randn(7, 2, 9, 12), angles.cos(), angles.sin()))
    elif name.startswith("norm of wide rows"):
        kind = name.rpartition(", ")[2]
        gamma = torch.randn(1100) if kind == "float32 scale" else torch.randn(1100).bfloat16()
        options = (1e-5, kind == "zero-centred")
        # More rows than programs of backward, of which each then walks through several.
        rms_norm._PROGRAMS = 8
        compared("rms_norm", (torch.randn(30, 1, 1100).bfloat16(), gamma), options, "bfloat16")
    elif name in LIGER:
        kind, _, dtype = name.removeprefix("Liger-Kernel's ").rpartition(" in ")
        x = torch.randn(30, 2, 96).to(getattr(torch, dtype))
        if kind == "swiglu":
            compared("swiglu", (x,), (), dtype, "liger")
        else:
            options = 1e-5, kind.startswith("zero")
            compared("rms_norm", (x, torch.randn(96).to(x)), options, dtype, "liger")
    elif name == "every kernel was run":
        assert kernels() - LAUNCHED == set()
    elif name == "swiglu of wide rows that lie apart":

        def view(tensor):
            return tensor[:, :4400]

        compared("swiglu", (torch.randn(5, 6000),))
    elif name == "cross entropy of many blocks":
        compared("cross_entropy", (torch.randn(6, 2, 9001) * 5, torch.randint(0, 9001, (6, 2))))
    elif name == "cross entropy of a part of the vocabulary":
        target = torch.tensor([0, 36, 37, -1, 100])
        compared("cross_entropy", (torch.randn(5, 37), target))
    elif name == "cross entropy of logits that are minus infinity":
        logits = torch.randn(4, 5000)
        logits[:, 3000:] = float("-inf")
        compared("cross_entropy", (logits, torch.tensor([0, 1, 2, 3])))
    else:
        raise ValueError(name)


LAUNCHED = set()
"""Names of kernels that a case launched."""


def kernels():
    """Return the names of all kernels that are launched, of every module with kernels."""
    import pkgutil
    from importlib import import_module

    from triton.runtime.interpreter import InterpretedFunction

    from mindspeed_kernels import device_kernels

    modules = [
        import_module(f"{device_kernels.__name__}.{module.name}")
        for module in pkgutil.iter_modules(device_kernels.__path__)
    ]
    defined = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, InterpretedFunction) and value.fn.__module__ == module.__name__
    }
    called = {name for value in defined.values() for name in value.fn.__code__.co_names}
    return {*defined} - called


def watch_launches():
    """Note each kernel that the package launches."""
    from mindspeed_kernels.device_kernels import cross_entropy, launching, rms_norm, rotary, swiglu

    original = launching.launch

    def launch(kernel, *arguments):
        LAUNCHED.add(kernel.fn.__name__)
        return original(kernel, *arguments)

    for module in (cross_entropy, rms_norm, rotary, swiglu):
        module.launch = launch


class Scalar(float):
    """A number that a kernel converts."""

    def to(self, dtype):
        """Return itself: it is computed with in the dtype of what it meets."""
        return self


def as_compiled():
    """Give the interpreter what the norm of Liger-Kernel has of the compiler.

    Its root is that of a device's library, whose functions return nothing in Python; it converts numbers that
    are passed to it, which the interpreter leaves as Python's; and it counts up to tensors with a dimension,
    which numpy 2 takes for no number.
    """
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    passed = interpreter._implicit_cvt

    def bounds(*values):
        return range(*(int(v.handle.data.item()) if hasattr(v, "handle") else v for v in values))

    rms_norm.range, rms_norm.rsqrt = bounds, lambda x: tl.rsqrt(x)
    interpreter._implicit_cvt = lambda value: Scalar(value) if type(value) is float else passed(value)


def main():
    found = {}
    watch_launches()
    if LIGER:
        as_compiled()
    # That every kernel was run is seen behind all others.
    for name in sorted((*CASES, *LIGER), key=lambda name: name == "every kernel was run"):
        try:
            case(name)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    main()
