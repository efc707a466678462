"""Calls that some builds of torch_npu lack, told by the schemas of the installed one."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import version

import torch


@cache
def call_missing(name: str, *arguments: str) -> str:
    """Return why the installed torch_npu does not take a call; empty when it does. It must be importable.

    Builds of one torch release differ: each belongs to a release of CANN, and names and arguments were added
    with those. An operator's schema tells what it takes.

    Args:
        name: of an operator, as ``torch_npu`` has it: ``npu_ring_attention_update``.
        arguments: that are passed by name.
    """
    operator = getattr(torch.ops.npu, name, None)
    if operator is None:
        # A value, or a function of Python: there is no schema to ask.
        if hasattr(import_module("torch_npu"), name):
            return ""
        return f"torch_npu {version('torch_npu')} has no {name}; install a later build"
    schemas = [getattr(operator, overload)._schema for overload in operator.overloads()]
    taken = [{argument.name for argument in schema.arguments} for schema in schemas]
    lacking = min(([name for name in arguments if name not in one] for one in taken), key=len, default=[])
    if not lacking:
        return ""
    return f"torch_npu {version('torch_npu')} takes no {', '.join(lacking)} in {name}; install a later build"
