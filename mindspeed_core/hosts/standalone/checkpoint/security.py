"""Check of the globals that a checkpoint's pickles name, before anything is unpickled.

``common.pt``, ``.metadata`` and the object shards inside ``.distcp`` files are pickles: loading one can run
any code. Every global that they refer to is read from the pickle's opcodes, without executing them, and
compared with a list of harmless ones.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from mindspeed_core.errors import CheckpointError

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

_STRING = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"})
_STORE = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_FETCH = frozenset({"GET", "BINGET", "LONG_BINGET"})
_EXTENSION = frozenset({"EXT1", "EXT2", "EXT4"})


def pickle_globals(stream: bytes | IO[bytes]) -> Iterator[str]:
    """Yield the full name of every global that a pickle refers to, without executing it.

    Raises:
        ValueError: the stream is no pickle, or hides a name (computes it instead of spelling it).
    """
    memo: dict[int, str | None] = {}
    # Strings pushed last, with nothing but memo bookkeeping in between: what STACK_GLOBAL would take.
    recent: list[str | None] = []
    for opcode, argument, _ in pickletools.genops(stream):
        name = opcode.name
        if name in _STRING:
            recent.append(argument)
        elif name in _FETCH:
            recent.append(memo.get(int(argument or 0)))
        elif name == "MEMOIZE":
            memo[len(memo)] = recent[-1] if recent else None
        elif name in _STORE:
            memo[int(argument or 0)] = recent[-1] if recent else None
        elif name in ("GLOBAL", "INST"):
            module, _, attribute = str(argument).partition(" ")
            yield f"{module}.{attribute}"
            recent = []
        elif name == "STACK_GLOBAL":
            if len(recent) < 2 or recent[-1] is None or recent[-2] is None:
                raise ValueError("a global's name is computed instead of spelled")
            yield f"{recent[-2]}.{recent[-1]}"
            recent = []
        elif name in _EXTENSION:
            yield f"copyreg extension {argument}"
            recent = []
        elif name not in ("PROTO", "FRAME"):
            recent = []


def check_pickle(stream: bytes | IO[bytes], where: str) -> None:
    """Refuse a pickle that names a global outside `ALLOWED`.

    Raises:
        CheckpointError: names the symbol and ``where``, the file and what is inside it.
    """
    try:
        unknown = next((name for name in pickle_globals(stream) if name not in ALLOWED), None)
    except Exception as error:
        raise CheckpointError(
            f"{where}: not a readable pickle ({type(error).__name__}: {error}); the file is damaged or forged"
        ) from error
    if unknown is not None:
        raise CheckpointError(
            f"{where}: refers to {unknown}, which no checkpoint needs; loading it could run foreign code. If "
            "you trust where it comes from, --trust-checkpoint loads it"
        )


def check_archive(stream: IO[bytes], where: str) -> None:
    """Refuse a ``torch.save`` archive whose pickle names a global outside `ALLOWED`.

    Raises:
        CheckpointError: names the file and the symbol; also for archives that can be read in two ways.
    """
    try:
        archive = zipfile.ZipFile(stream)
        names = archive.namelist()
        pickles = [name for name in names if name.rpartition("/")[2] == "data.pkl"]
        if len(set(names)) != len(names) or len(pickles) != 1:
            raise CheckpointError(f"{where}: {len(pickles)} pickles in one archive; the file is forged")
        content = archive.read(pickles[0])
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{where}: not an archive written by torch.save ({type(error).__name__}: {error}); the file is "
            "damaged"
        ) from error
    check_pickle(content, where)


def check_common(directory: Path) -> None:
    """Check ``common.pt``."""
    path = directory / "common.pt"
    with _open(path) as file:
        check_archive(file, str(path))


def check_metadata(directory: Path) -> None:
    """Check ``.metadata``, the index of the shards."""
    path = directory / ".metadata"
    with _open(path) as file:
        check_pickle(file, str(path))


def object_shards(metadata: Any) -> list[tuple[str, str, int, int]]:
    """Return the object shards of a loaded index: ``(key, file, offset, length)`` each, sorted."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    found = []
    kinds = metadata.state_dict_metadata
    for index, info in (metadata.storage_data or {}).items():
        # An entry that the index calls a tensor is loaded with weights_only; every other one is unpickled.
        if isinstance(kinds.get(index.fqn), BytesStorageMetadata) or index.fqn not in kinds:
            found.append((str(index.fqn), str(info.relative_path), int(info.offset), int(info.length)))
    return sorted(found)


def check_objects(directory: Path, shards: Iterable[tuple[str, str, int, int]]) -> None:
    """Check object shards inside ``.distcp`` files."""
    for key, name, offset, length in shards:
        path = directory / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CheckpointError(f"{directory / '.metadata'}: names a file outside the checkpoint: {name!r}")
        with _open(path) as file:
            file.seek(offset)
            check_archive(io.BytesIO(file.read(length)), f"{path}, object {key!r}")


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
