"""The classes that pickles of checkpoints may name, each with a function of ours that makes its value.

They are those that torch and megatron-core write, numpy's numbers, and the records in Megatron-LM's
arguments. What is a class of theirs there is a plain value or a `Record` here, of checked arguments and
state.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mindspeed_train.checkpoint.inert_pickle import Builder, Record, Table, Values
from mindspeed_train.checkpoint.pickle_nodes import Made, Name, PickleError, Sequence
from mindspeed_train.checkpoint.pickled_arrays import (
    array,
    array_from_buffer,
    buffer,
    integers,
    number,
    refuse,
)

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 "
        "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    ).split()
    if hasattr(torch, name)
}
"""Types of tensors, by name."""

STORAGES: dict[str, torch.dtype] = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "Untyped": torch.uint8,
}
"""Types of the elements of typed storages, by the name before ``Storage``."""


def _plain(kind: Callable[[Any], Any], *accepted: type) -> Builder:
    def build(values: Values, made: Made) -> Any:
        (node,) = values.sequence(made.arguments, 1)
        found = values.value(node)
        if type(found) not in accepted or (isinstance(found, str) and len(found) > 100):
            raise PickleError(f"{made.name} of a {type(found).__name__}")
        return kind(found)

    return build


def _collection(kind: type) -> Builder:
    def build(values: Values, made: Made) -> Any:
        nodes = values.sequence(made.arguments)
        items = [item for node in nodes for item in values.sequence(node)] if len(nodes) < 2 else refuse(made)
        if made.pairs or made.state is not None:
            refuse(made)
        items = [*items, *made.items]
        if kind in (set, frozenset):
            return kind(values.key(item) for item in items)
        return kind(values.value(item) for item in items)

    return build


def _dictionary(kind: type) -> Builder:
    def build(values: Values, made: Made) -> Any:
        pairs = list(made.pairs)
        for node in values.sequence(made.arguments):
            if isinstance(node, Sequence):
                # The form of old protocols: a list of pairs.
                pairs += [(first, second) for first, second in (values.sequence(p, 2) for p in node.items)]
            else:
                pairs += values.pairs(node)
        if made.items:
            refuse(made)
        return kind(values.dictionary(pairs))

    return build


def _encoded(values: Values, made: Made) -> bytes:
    text, encoding = (values.text(node) for node in values.sequence(made.arguments, 2))
    if encoding not in ("latin1", "latin-1"):
        raise PickleError(f"text in the encoding {encoding!r}")
    return text.encode("latin-1")


def _no_bytes(values: Values, made: Made) -> bytes:
    """Make the empty bytes, which old protocols write as a call."""
    if values.sequence(made.arguments):
        refuse(made)
    return b""


def _complex(values: Values, made: Made) -> complex:
    parts = [values.value(node) for node in values.sequence(made.arguments, 2)]
    if not all(type(part) is float for part in parts):
        refuse(made)
    return complex(*parts)


def _path(values: Values, made: Made) -> str:
    return "/".join(values.text(node) for node in values.sequence(made.arguments)).replace("//", "/")


def _namespace(values: Values, made: Made) -> Namespace:
    if values.sequence(made.arguments):
        refuse(made)
    found = Namespace()
    for name, node in values.fields(made.state).items() if made.state is not None else ():
        if not name.isidentifier() or name.startswith("__"):
            raise PickleError(f"an argument with the name {name[:40]!r}")
        vars(found)[name] = values.value(node)
    return found


def _record(values: Values, made: Made) -> Record:
    return Record(made.name, values.value(made.arguments), values.value(made.state))


def _ignored(values: Values, made: Made) -> Record:
    """Make nothing of what is not read: plans of a save may be larger than all the rest."""
    return Record(made.name)


def _size(values: Values, made: Made) -> torch.Size:
    (node,) = values.sequence(made.arguments, 1)
    return torch.Size(integers(values, node))


def _device(values: Values, made: Made) -> Record:
    arguments = values.value(made.arguments)
    if not all(isinstance(each, (str, int)) for each in arguments):
        refuse(made)
    return Record(made.name, arguments)


def _layout(values: Values, made: Made) -> Any:
    (node,) = values.sequence(made.arguments, 1)
    if values.text(node) != "torch.strided":
        raise PickleError(f"the layout {node[:40]!r}")
    return torch.strided


def _tensor(values: Values, made: Made) -> torch.Tensor:
    """Make a view of a storage that an archive gave, within its bounds and no larger than it."""
    nodes = values.sequence(made.arguments)
    if not 4 <= len(nodes) <= 7 or made.state is not None or made.items or made.pairs:
        refuse(made)
    return _view(values, values.value(nodes[0]), nodes)


def _tensor_of_dtype(values: Values, made: Made) -> torch.Tensor:
    """Make a view of untyped bytes, as torch writes dtypes that have no storage class."""
    nodes = values.sequence(made.arguments)
    if not 7 <= len(nodes) <= 8 or made.state is not None or made.items or made.pairs:
        refuse(made)
    storage, dtype = values.value(nodes[0]), values.value(nodes[6])
    if not isinstance(dtype, torch.dtype) or not isinstance(storage, torch.Tensor):
        raise PickleError("a tensor without bytes, or without a known dtype")
    if storage.nbytes % dtype.itemsize:
        raise PickleError("a tensor whose bytes are no whole elements")
    return _view(values, storage.view(dtype), nodes)


def _view(values: Values, storage: Any, nodes: list[Any]) -> torch.Tensor:
    if not isinstance(storage, torch.Tensor):
        raise PickleError("a tensor without bytes")
    offset, size, stride = values.integer(nodes[1]), integers(values, nodes[2]), integers(values, nodes[3])
    if len(size) != len(stride):
        raise PickleError("a tensor with other strides than sizes")
    count, last = 1, offset
    for length, step in zip(size, stride):
        count *= length
        last += max(length - 1, 0) * step
    if count > storage.numel() - offset or (count and last >= storage.numel()):
        raise PickleError("a tensor larger than its bytes")
    values.spend(count * storage.itemsize >> 3)
    return storage.as_strided(size, stride, offset)


def _parameter(values: Values, made: Made) -> torch.Tensor:
    nodes = values.sequence(made.arguments)
    found = values.value(nodes[0]) if 3 <= len(nodes) <= 4 else None
    if not isinstance(found, torch.Tensor):
        refuse(made)
    return found


def _tensor_with_attributes(values: Values, made: Made) -> torch.Tensor:
    """Make a tensor to which attributes were added, without them."""
    build, kind, arguments, _ = values.sequence(made.arguments, 4)
    maker = {"_rebuild_tensor_v2": _tensor, "_rebuild_tensor_v3": _tensor_of_dtype, **_PARAMETERS}.get(
        build.full.removeprefix("torch._utils.") if isinstance(build, Name) else ""
    )
    if maker is None or not isinstance(kind, Name) or kind.full not in _TENSORS:
        refuse(made)
    return maker(values, Made(build.full, arguments))


_PARAMETERS = {"_rebuild_parameter": _parameter, "_rebuild_parameter_with_state": _parameter}
_TENSORS = ("torch.Tensor", "torch.nn.parameter.Parameter")


def properties(values: Values, node: Any) -> str:
    """Return the name of the dtype in torch's ``TensorProperties``."""
    made = values.called(node, "TensorProperties")
    if isinstance(made.state, Sequence):
        kind = values.sequence(made.state)[0]
    else:
        kind = values.fields(made.state).get("dtype")
    name = kind.full.removeprefix("torch.") if isinstance(kind, Name) else ""
    if name not in DTYPES:
        raise PickleError("a tensor without a known dtype")
    return name


_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_FILES = "torch.distributed.checkpoint.filesystem"
_MCORE = "megatron.core.dist_checkpointing.strategies.torch"

NOT_READ: Mapping[str, Builder] = {
    **dict.fromkeys(
        (f"{_METADATA}.{name}" for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")), _ignored
    ),
    **dict.fromkeys(
        (
            f"{_METADATA}.{name}"
            for name in (
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
            )
        ),
        _ignored,
    ),
    **dict.fromkeys(
        (
            f"{_PLANNER}.{name}"
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
        ),
        _ignored,
    ),
    f"{_FILES}._StorageInfo": _ignored,
    f"{_FILES}._StoragePrefix": _ignored,
    f"{_MCORE}.MCoreSavePlan": _ignored,
}
"""Classes of an index whose nodes are read by the one who reads the index, or not at all."""

_VALUES: Mapping[str, Builder] = {
    "builtins.set": _collection(set),
    "builtins.frozenset": _collection(frozenset),
    "builtins.list": _collection(list),
    "builtins.tuple": _collection(tuple),
    "builtins.dict": _dictionary(dict),
    "collections.OrderedDict": _dictionary(OrderedDict),
    "builtins.int": _plain(int, int, bool),
    "builtins.float": _plain(float, float, int),
    "builtins.bool": _plain(bool, bool, int),
    "builtins.complex": _complex,
    "builtins.bytes": _no_bytes,
    "_codecs.encode": _encoded,
    "_io.BytesIO": buffer,
    "pathlib.Path": _path,
    "pathlib.PosixPath": _path,
    "pathlib._local.PosixPath": _path,
    "argparse.Namespace": _namespace,
    "types.SimpleNamespace": _namespace,
    "signal.Signals": _record,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    **{f"torch._utils.{name}": build for name, build in _PARAMETERS.items()},
    "torch._tensor._rebuild_from_type_v2": _tensor_with_attributes,
    **dict.fromkeys(_TENSORS, _ignored),
    "numpy.ndarray": _ignored,
    "numpy.dtype": _record,
    **dict.fromkeys(
        (f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")),
        array,
    ),
    **dict.fromkeys((f"numpy.{core}.multiarray.scalar" for core in ("core", "_core")), number),
    **dict.fromkeys((f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")), array_from_buffer),
    **dict.fromkeys(
        (
            "megatron.core.enums.ModelType",
            "megatron.core.transformer.enums.AttnBackend",
            "megatron.core.transformer.enums.CudaGraphScope",
            "megatron.core.rerun_state_machine.RerunMode",
            "megatron.core.rerun_state_machine.RerunState",
            "megatron.core.rerun_state_machine.RerunDiagnostic",
        ),
        _record,
    ),
    **dict.fromkeys((f"torch.{name}Storage" for name in STORAGES), _ignored),
    **dict.fromkeys((f"torch.storage.{name}Storage" for name in STORAGES), _ignored),
}

_CONSTANTS: Mapping[str, Any] = {
    **{f"torch.{name}": value for name, value in DTYPES.items()},
    "torch.strided": torch.strided,
    "torch.contiguous_format": torch.contiguous_format,
    "torch.preserve_format": torch.preserve_format,
    "torch.channels_last": torch.channels_last,
}

VALUES = Table(_VALUES, _CONSTANTS)
"""Names that common state and objects may refer to."""


def index_table(build: Builder) -> Table:
    """Return the names that an index may refer to; ``build`` makes its value of the ``Metadata`` of torch."""
    metadata = {f"{_METADATA}.Metadata": build, f"{_MCORE}.MCoreMetadata": build}
    return Table({**_VALUES, **NOT_READ, **metadata}, _CONSTANTS)
