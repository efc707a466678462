"""Custom operators of torch, for the few cases that plain dispatch cannot express.

Those are: operators that change an argument in place (accumulation into a main gradient), kernels that a
compiler must treat as opaque, and device operators without an autograd formula. A custom operator costs
tens of microseconds per call and is a wall for a compiler, so everything else stays plain Python.

The library has a namespace of its own: defining a schema twice in one process is an error of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

NAMESPACE = "mskernels"


def custom_op(
    name: str, *, mutates_args: Iterable[str] = (), schema: str | None = None
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function with annotated tensors and numbers: it is ``torch.ops.mskernels.<name>``.

    The function serves every device; it looks at ``tensor.device.type`` and imports ``torch_npu`` itself,
    because a kernel for a device can be registered only where that device is known to torch. The result has
    ``register_fake`` and ``register_autograd``, and both are needed: without the second, gradients would
    silently be None.

    Args:
        name: name within the namespace.
        mutates_args: names of arguments that are changed in place.
        schema: types of arguments and result; by default from the function's annotations.
    """
    return torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=tuple(mutates_args), schema=schema)
