"""Reading of a checkpoint's pickles by a reader that knows a list of harmless globals, and no others.

``.metadata`` and the object shards inside ``.distcp`` files are pickles: loading one can run any code. The
unpickler that loads the bytes itself asks the list for every global; nothing is looked at by one reader and
loaded by another.
"""

from __future__ import annotations

import _compat_pickle
import io
import json
import pickle
import pickletools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from mindspeed_core.errors import CheckpointError
from mindspeed_core.hosts.standalone.checkpoint.archive_layout import check_layout
from mindspeed_core.hosts.standalone.checkpoint.publish import explain

_DTYPES = (
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 "
    "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
).split()
_STORAGES = (
    "Double Float Half BFloat16 Long Int Short Char Byte Bool ComplexFloat ComplexDouble Untyped"
).split()
_METADATA = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING"
).split()

_TORCH = (
    "torch.Size torch.device torch.strided torch.contiguous_format torch.preserve_format "
    "torch.channels_last torch._utils._rebuild_tensor torch._utils._rebuild_tensor_v2 "
    "torch._utils._rebuild_parameter torch.serialization._get_layout torch.storage.UntypedStorage "
    "torch.distributed.checkpoint.filesystem._StorageInfo "
    "torch.distributed.checkpoint.filesystem._StoragePrefix torch.distributed.checkpoint.planner.SavePlan "
    "torch.distributed.checkpoint.planner.WriteItem torch.distributed.checkpoint.planner.WriteItemType "
    "torch.distributed.checkpoint.planner.TensorWriteData"
).split()
# megatron-core 0.15 writes subclasses of torch's data classes, with one more field each.
_MEGATRON_CORE = (
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata "
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan"
).split()
_PLAIN = (
    "collections.OrderedDict builtins.set builtins.frozenset builtins.list builtins.dict builtins.tuple "
    "builtins.int builtins.float builtins.bool builtins.complex _codecs.encode pathlib.Path "
    "pathlib.PosixPath pathlib._local.PosixPath numpy.ndarray numpy.dtype "
    "numpy.core.multiarray._reconstruct numpy.core.multiarray.scalar numpy._core.multiarray._reconstruct "
    "numpy._core.multiarray.scalar"
).split()
_MEGATRON_LM = (
    "argparse.Namespace types.SimpleNamespace signal.Signals megatron.core.enums.ModelType "
    "megatron.core.transformer.enums.AttnBackend megatron.core.transformer.enums.CudaGraphScope "
    "megatron.core.rerun_state_machine.RerunMode megatron.core.rerun_state_machine.RerunState "
    "megatron.core.rerun_state_machine.RerunDiagnostic"
).split()
"""The classes in the arguments of Megatron-LM's checkpoints: records and enumerations without behaviour."""

ALLOWED: frozenset[str] = frozenset(
    {
        *_MEGATRON_LM,
        *_MEGATRON_CORE,
        *_TORCH,
        *_PLAIN,
        *(f"torch.{name}" for name in _DTYPES),
        *(f"torch.{name}Storage" for name in _STORAGES),
        *(f"torch.storage.{name}Storage" for name in _STORAGES),
        *(f"torch.distributed.checkpoint.metadata.{name}" for name in _METADATA),
    }
)
"""Globals that a checkpoint may name, by full name. Whole modules are never allowed: a module's namespace
holds everything it imports."""


_ANOTHER = "choose another checkpoint with --ckpt-step"
_KEEPING = ("PUT", "BINPUT", "LONG_BINPUT")
"""Operations of pickles that keep an object under a number of their own choice."""


class _AllowedUnpickler(pickle.Unpickler):
    """Unpickles listed globals alone; ``where`` names the file."""

    where = ""

    def __init__(self, file: IO[bytes], **options: Any) -> None:
        """Read a pickle from ``file``, to its end.

        Raises:
            ValueError: it would take memory without bound, or is cut off.
        """
        content = file.read()
        self.length = _checked_length(content)
        super().__init__(io.BytesIO(content), **options)

    def find_class(self, module: str, name: str) -> Any:
        """Return a listed global.

        Raises:
            CheckpointError: it is not listed.
        """
        # Old protocols spell the names of Python 2.
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        if f"{module}.{name}" not in ALLOWED or "." in name:
            raise CheckpointError(
                f"{self.where}: refers to {module}.{name}, which no checkpoint needs; loading it could run "
                "foreign code. If you trust where it comes from, --trust-checkpoint loads it"
            )
        return super().find_class(module, name)


def load_pickle(content: bytes, where: str) -> Any:
    """Unpickle bytes that may name only globals of `ALLOWED`.

    Args:
        content: the pickle, and nothing after it.
        where: the file and what is inside it, for the message.

    Raises:
        CheckpointError: it names another one, or is no pickle.
    """
    with _explained(where):
        unpickler = _unpickler(where)(io.BytesIO(content))
        if unpickler.length != len(content):
            raise ValueError("something follows the pickle")
        return unpickler.load()


def _checked_length(content: bytes) -> int:
    """Return the length of the pickle that ``content`` begins with.

    The unpickler makes its memo as long as the largest number that a pickle keeps an object under: seven
    bytes of a forged or damaged file are enough for all memory of a machine.

    Raises:
        ValueError: it keeps an object under a number that its objects cannot reach, or is cut off.
    """
    end = 0
    for operation, number, position in pickletools.genops(content):
        if operation.name in _KEEPING and not 0 <= int(number or 0) < len(content):
            raise ValueError(f"it keeps an object under the number {number}, and has {len(content)} bytes")
        end = (position or 0) + 1
    return end


def load_archive(content: bytes, where: str) -> Any:
    """Load a ``torch.save`` archive that may name only globals of `ALLOWED`.

    Args:
        content: the archive.
        where: the file and what is inside it, for the message.

    Raises:
        CheckpointError: it names another one, or could be read in two ways.
    """
    return _load_archive(torch.load, content, where, "cpu")


def _load_archive(load: Callable[..., Any], content: bytes, where: str, map_location: Any) -> Any:
    with _explained(where):
        check_layout(content)
        reader = SimpleNamespace(__name__="allowed", Unpickler=_unpickler(where))
        return load(io.BytesIO(content), map_location=map_location, weights_only=False, pickle_module=reader)


def _unpickler(where: str) -> type[_AllowedUnpickler]:
    return type("AllowedUnpickler", (_AllowedUnpickler,), {"where": where})


@contextmanager
def _explained(where: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"{where}: cannot be unpickled ({type(error).__name__}: {first}); the file is damaged or forged; "
            f"{_ANOTHER}"
        ) from error


@contextmanager
def only_allowed(directory: Path) -> Iterator[None]:
    """Let torch and megatron-core unpickle nothing but listed globals in this block.

    They load objects and the index with functions of their own, which are replaced until the block ends.
    """
    original, pickles = torch.load, filesystem.pickle

    def load(file: Any, map_location: Any = None, *rest: Any, **named: Any) -> Any:
        if named.get("weights_only") is not False:
            return original(file, map_location, *rest, **(named | {"weights_only": True}))
        content = file.read() if hasattr(file, "read") else Path(file).read_bytes()
        return _load_archive(original, content, f"{directory}: an object", map_location)

    index = str(directory / ".metadata")
    readers = SimpleNamespace(dump=pickle.dump, load=lambda stream: load_pickle(stream.read(), index))
    try:
        vars(torch)["load"], vars(filesystem)["pickle"] = load, readers
        yield
    finally:
        vars(torch)["load"], vars(filesystem)["pickle"] = original, pickles


def read_common(directory: Path, classes: Sequence[Any], *, trusted: bool = False) -> dict[str, Any]:
    """Read ``common.pt``: plain values, tensors and records of ``classes``; anything where it is trusted.

    Raises:
        CheckpointError: it holds something else, or cannot be read.
    """
    path = directory / "common.pt"
    content = _read(path)
    try:
        if not trusted:
            check_layout(content)
        with torch.serialization.safe_globals(list(classes)):
            state: dict[str, Any] = torch.load(
                io.BytesIO(content), map_location="cpu", weights_only=not trusted
            )
        return state
    except Exception as error:
        # Never torch's advice to switch weights_only off: only the user's own word does that.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        if "eights only" in first:
            named = re.search(r"GLOBAL (\S+)", str(error))
            first = f"it refers to {named.group(1)}" if named else "it holds more than values and tensors"
            first += "; --trust-checkpoint loads it, if you trust where it comes from"
        raise CheckpointError(f"{path}: cannot be read ({first}); choose another with --ckpt-step") from error


def read_index(directory: Path, *, trusted: bool = False) -> Any:
    """Read ``.metadata``, the index of the shards.

    Raises:
        CheckpointError: it names a global that is not listed, or cannot be read.
    """
    path = directory / ".metadata"
    content = _read(path)
    if trusted:
        with _explained(str(path)):
            return pickle.loads(content)  # noqa: S301 - the user's own word
    index = load_pickle(content, str(path))
    with _explained(str(path)):
        _check_index(index)
    return index


def _check_index(index: Any) -> None:
    """Raise where an index that could be unpickled is none: an altered pickle may be anything."""
    if not isinstance(index, Metadata) or not isinstance(index.state_dict_metadata, dict):
        raise TypeError(f"a {type(index).__name__} and no index")
    for key, entry in index.state_dict_metadata.items():
        if not isinstance(key, str):
            raise TypeError(f"the key {key!r}")
        if not isinstance(entry, (TensorStorageMetadata, BytesStorageMetadata)):
            raise TypeError(f"{key!r} is a {type(entry).__name__}")
        if isinstance(entry, TensorStorageMetadata) and not isinstance(entry.properties.dtype, torch.dtype):
            raise TypeError(f"{key!r} has the dtype {entry.properties.dtype!r}")


def check_present(directory: Path, index: Any) -> None:
    """Check that the files that an index names are there, and that megatron-core's own description is one.

    Raises:
        CheckpointError: names the file.
    """
    for name in sorted({str(info.relative_path) for info in (index.storage_data or {}).values()}):
        _check_inside(directory, name)
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name}: missing, or no file; {_ANOTHER}")
    path = directory / "metadata.json"
    try:
        known = isinstance(json.loads(_read(path)), dict)
    except ValueError:
        known = False
    if not known:
        raise CheckpointError(f"{path}: cannot be read, the file is damaged; {_ANOTHER}")


def _check_inside(directory: Path, name: str) -> None:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CheckpointError(
            f"{directory / '.metadata'}: names a file outside the checkpoint: {name!r}; {_ANOTHER}"
        )


def object_shards(metadata: Any) -> list[tuple[str, str, int, int]]:
    """Return the object shards of a loaded index: ``(key, file, offset, length)`` each, sorted."""
    found = []
    kinds = metadata.state_dict_metadata
    for index, info in (metadata.storage_data or {}).items():
        # An entry that the index calls a tensor is loaded with weights_only; every other one is unpickled.
        if isinstance(kinds.get(index.fqn), BytesStorageMetadata) or index.fqn not in kinds:
            found.append((str(index.fqn), str(info.relative_path), int(info.offset), int(info.length)))
    return sorted(found)


def check_objects(directory: Path, shards: Iterable[tuple[str, str, int, int]]) -> None:
    """Load object shards inside ``.distcp`` files, before any tensor is overwritten, and forget them.

    Raises:
        CheckpointError: one names a global that is not listed, or lies outside the checkpoint.
    """
    for key, name, offset, length in shards:
        path = directory / name
        _check_inside(directory, name)
        load_archive(_read(path, offset, length), f"{path}, object {key!r}")


def _read(path: Path, offset: int = 0, length: int = -1) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: is no file; {_ANOTHER}")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(length)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; {_ANOTHER}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {explain(error)}") from error
