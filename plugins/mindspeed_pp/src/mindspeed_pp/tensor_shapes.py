"""Several tensors between pipeline stages, as a flag describes them.

The text is JSON: a list with one object for each tensor, in the order in which a stage returns them. Sizes
are numbers, or letters for sizes of the run: ``s`` tokens of this rank's part of a sequence, ``S`` of the
whole sequence, ``b`` samples of a micro-batch, ``h`` the hidden size; ``2*h`` is twice as much.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_core.discovery.entry_points import load_object
from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_pp.asked import SHAPES_FLAG

if TYPE_CHECKING:
    from mindspeed_core.run import BoundarySchema

DTYPES: Mapping[str, str] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    **{name: name for name in ("int64", "int32", "int16", "int8", "uint8")},
}
"""Name in the flag, and torch's."""
_SIZE = re.compile(r"(?:(\d+)\*)?([sSbh])\Z")
_PROVIDER = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*\Z")
_KEYS = {"name", "shape", "dtype", "grad"}
_EXAMPLE = '[{"name": "hidden", "shape": ["s", "b", "h"]}]'


@dataclass(frozen=True)
class Described:
    """One tensor as the flag describes it.

    Attributes:
        name: of the tensor.
        shape: numbers, or a factor and a letter.
        dtype: see `DTYPES`; empty for that of the pipeline.
        grad: its gradient travels back.
    """

    name: str
    shape: tuple[int | tuple[int, str], ...]
    dtype: str
    grad: bool


def is_provider(text: str) -> bool:
    """Return whether the flag names a function, ``module:function``."""
    return bool(_PROVIDER.match(text.strip()))


def parse_shapes(text: str) -> tuple[Described, ...]:
    """Read the JSON form.

    Raises:
        ArgumentError: it is none; the message names the tensor.
    """
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        raise ArgumentError(
            SHAPES_FLAG, text, "is neither JSON nor module:function", f"write {_EXAMPLE}"
        ) from None
    if not isinstance(read, list) or not read or not all(isinstance(item, dict) for item in read):
        raise ArgumentError(SHAPES_FLAG, text, "is no list of tensors", f"write {_EXAMPLE}")
    found = tuple(_described(text, item) for item in read)
    if len({each.name for each in found}) != len(found):
        raise ArgumentError(SHAPES_FLAG, text, "names a tensor twice", "give each another name")
    return found


def _described(text: str, item: dict[str, Any]) -> Described:
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise ArgumentError(SHAPES_FLAG, text, f"{item} has no name", f"write {_EXAMPLE}")
    unknown = sorted(set(item) - _KEYS)
    if unknown:
        raise ArgumentError(
            SHAPES_FLAG, text, f"{name} has {unknown[0]!r}", "use name, shape, dtype and grad"
        )
    shape = item.get("shape")
    if not isinstance(shape, list) or not shape:
        raise ArgumentError(SHAPES_FLAG, text, f"{name} has no shape", f"write {_EXAMPLE}")
    dtype = item.get("dtype", "")
    if dtype and dtype not in DTYPES:
        raise ArgumentError(SHAPES_FLAG, text, f"{name} has the type {dtype!r}", f"use {', '.join(DTYPES)}")
    floating = not dtype or "int" not in dtype
    grad = item.get("grad", floating)
    if not isinstance(grad, bool) or (grad and not floating):
        raise ArgumentError(
            SHAPES_FLAG,
            text,
            f"{name} of {dtype or 'the pipeline'} has grad {grad}",
            "use false for whole numbers",
        )
    return Described(name, tuple(_size(text, name, size) for size in shape), dtype, grad)


def _size(text: str, name: str, size: Any) -> int | tuple[int, str]:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.match(size) if isinstance(size, str) else None
    if match is None:
        raise ArgumentError(
            SHAPES_FLAG, text, f"{name} has the size {size!r}", 'use numbers, "s", "S", "b", "h" or "2*h"'
        )
    return int(match[1] or 1), match[2]


def schema_of(args: Namespace, config: Any) -> BoundarySchema:
    """Return the tensors that cross from stage to stage.

    Args:
        args: with the sizes of a micro-batch.
        config: megatron-core's configuration of the model.

    Raises:
        UserError: a function cannot be imported, or returns something else.
    """
    text = args.pipeline_tensor_shapes
    if is_provider(text):
        return _provided(text, args, config)
    import torch

    from mindspeed_core.run import BoundarySchema, TensorSpec

    own = args.seq_length // config.context_parallel_size
    if config.sequence_parallel:
        own //= config.tensor_model_parallel_size
    sizes = {"s": own, "S": args.seq_length, "b": args.micro_batch_size, "h": config.hidden_size}
    return BoundarySchema(
        tuple(
            TensorSpec(
                each.name,
                tuple(size if isinstance(size, int) else size[0] * sizes[size[1]] for size in each.shape),
                getattr(torch, DTYPES[each.dtype]) if each.dtype else config.pipeline_dtype,
                each.grad,
            )
            for each in parse_shapes(text)
        )
    )


def _provided(text: str, args: Namespace, config: Any) -> BoundarySchema:
    from mindspeed_core.run import BoundarySchema, TensorSpec

    try:
        function = load_object(text)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"{SHAPES_FLAG} {text}: cannot be imported ({error}); name a function of (args, config) that "
            "Python finds"
        ) from error
    made = function(args, config)
    tensors = made.tensors if isinstance(made, BoundarySchema) else made
    if not isinstance(tensors, (list, tuple)) or not tensors:
        raise UserError(f"{SHAPES_FLAG} {text}: returns {made!r}; return a list of TensorSpec")
    for spec in tensors:
        if not isinstance(spec, TensorSpec) or (spec.requires_grad and not spec.dtype.is_floating_point):
            raise UserError(
                f"{SHAPES_FLAG} {text}: returns {spec!r}; return TensorSpec, with requires_grad for floating "
                "types alone"
            )
    return BoundarySchema(tuple(tensors))
