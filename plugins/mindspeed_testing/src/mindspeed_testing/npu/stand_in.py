"""``torch_npu`` by its written contracts alone, on CPU tensors: for suites that run without the package.

Operations bind their arguments by recorded schemas and run their `Kernel`. Autograd follows those whose
formula is known. Of others tensors that require grad are refused, as code that forgets a backward would train
without gradients.
"""

from __future__ import annotations

import json
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from mindspeed_testing.npu.derivatives import FORMULAS, follow
from mindspeed_testing.npu.kernels import all_kernels
from mindspeed_testing.npu.kernels.contract import Arguments, Kernel


@contextmanager
def kernels_on_cpu(schemas: Path, soc: str = "910B") -> Iterator[Counter[str]]:
    """Install a module ``torch_npu`` that has the operations with a contract and a recorded schema.

    Args:
        schemas: the record that ``python -m mindspeed_testing.npu --write-schemas`` wrote.
        soc: the generation of the device.

    Yields:
        How often each operation ran, by name without namespace.
    """
    assert "torch_npu" not in sys.modules, "torch_npu is installed: use a device with values instead"
    calls: Counter[str] = Counter()
    module = types.ModuleType("torch_npu")
    atb = types.SimpleNamespace()
    for name, schema in _recorded(schemas):
        kernel = all_kernels().get(_operation(schema))
        if kernel is not None:
            function = partial(_call, kernel, schema, soc, calls)
            setattr(atb if kernel.operation.startswith("atb::") else module, name, function)
    with mock.patch.dict(sys.modules, torch_npu=module), mock.patch.object(torch.ops, "atb", atb):
        yield calls


def _recorded(path: Path) -> Iterator[tuple[str, Any]]:
    """Iterate over the first schema of every recorded operation."""
    for name, lines in json.loads(path.read_text(encoding="utf-8"))["names"].items():
        if lines and "::" in lines[0].partition("(")[0]:
            yield name.rpartition(".")[2], torch._C.parse_schema(lines[0][: lines[0].rindex(" [")])


def _operation(schema: Any) -> str:
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def _call(
    kernel: Kernel, schema: Any, soc: str, calls: Counter[str], *args: Any, **options: Any
) -> Any:  # fmt: skip
    values = bind(schema, args, options)
    name = kernel.operation.partition("::")[2]

    def run(operation: str, arguments: Mapping[str, Any]) -> Any:
        calls[operation] += 1
        return all_kernels()[f"npu::{operation}"].run(Arguments(arguments, soc))

    if torch.is_grad_enabled() and any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(values)
    ):
        if name in FORMULAS:
            return follow(FORMULAS[name], run, name, values)
        raise AssertionError(f"{kernel.operation} is given tensors that require grad, and has no backward")
    calls[name] += 1
    return kernel.run(Arguments(values, soc))


def bind(schema: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included.

    Raises:
        TypeError: they do not fit the schema.
    """
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    if len(args) > len(positional):
        raise TypeError(f"{schema.name} takes {len(positional)} positional arguments, got {len(args)}")
    given = dict(options)
    for argument, value in zip(positional, args):
        if argument.name in given:
            raise TypeError(f"{schema.name}: {argument.name} is given twice")
        given[argument.name] = value
    values = {}
    for argument in schema.arguments:
        if argument.name in given:
            values[argument.name] = _checked(schema, argument, given.pop(argument.name))
        elif argument.has_default_value():
            values[argument.name] = argument.default_value
        else:
            raise TypeError(f"{schema.name}: {argument.name} is missing")
    if given:
        raise TypeError(f"{schema.name} has no arguments {sorted(given)}")
    return values


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "Tensor": lambda value: isinstance(value, torch.Tensor),
    "List[Tensor]": lambda value: (
        isinstance(value, (list, tuple)) and all(isinstance(item, torch.Tensor) for item in value)
    ),
    "int": lambda value: isinstance(value, (int, torch.dtype)) and not isinstance(value, bool),
    "List[int]": lambda value: (
        isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value)
    ),
    "float": lambda value: isinstance(value, (int, float)),
    "number": lambda value: isinstance(value, (int, float)),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
}


def _checked(schema: Any, argument: Any, value: Any) -> Any:
    kind = str(argument.type)
    if kind.startswith("Optional["):
        if value is None:
            return value
        kind = kind.removeprefix("Optional[").removesuffix("]")
    if not _KINDS[kind](value):
        raise TypeError(f"{schema.name}: {argument.name} must be {kind}, got {type(value).__name__}")
    return value
