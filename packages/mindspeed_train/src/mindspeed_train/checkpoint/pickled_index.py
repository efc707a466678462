"""``.metadata``, the pickled index of torch, interpreted and never unpickled.

Its classes are those of ``torch.distributed.checkpoint`` and the subclasses of megatron-core. What a load
needs of it becomes plain values, in the form of the index as data; plans of the save, which may be larger
than all the rest, are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_train.checkpoint.inert_pickle import Values, read_pickle
from mindspeed_train.checkpoint.pickle_nodes import Made, Pairs, PickleError
from mindspeed_train.checkpoint.pickled_arrays import shape_of
from mindspeed_train.checkpoint.pickled_classes import index_table, properties

_NESTED = "nd_reformulated_orig_global_shape"


def read_pickled_index(content: bytes, path: Path, *, trusted: bool = False) -> Any:
    """Return the plain values of a pickled index.

    Raises:
        CheckpointError: it is none, or refers to something that no checkpoint needs.
    """
    return read_pickle(content, str(path), index_table(_index), trusted=trusted) if content else None


def _index(values: Values, made: Made) -> dict[str, Any]:
    content = values.fields(made.state)
    files: dict[str, int] = {}
    places = _places(values, content.get("storage_data"), files)
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for name, entry in values.pairs(content.get("state_dict_metadata")):
        key = values.text(name)
        if key in tensors or key in objects:
            raise PickleError("a key comes twice")
        kind = entry.name.rpartition(".")[2] if isinstance(entry, Made) else ""
        if kind == "BytesStorageMetadata":
            objects[key] = _place_of(places, key, None)
        else:
            tensors[key] = _tensor(values, key, values.called(entry, "TensorStorageMetadata"), places)
    return {
        "format": "mindspeed-index-1",
        "files": list(files),
        "tensors": tensors,
        "objects": objects,
        "reformulated": _reformulated(values, content.get("mcore_data")),
    }


Places = dict[tuple[str, tuple[int, ...] | None], list[int]]


def _places(values: Values, node: Any, files: dict[str, int]) -> Places:
    found: Places = {}
    for index, info in values.pairs(node):
        where = values.fields(values.called(index, "MetadataIndex").state)
        offset = where.get("offset")
        place = values.fields(values.called(info, "_StorageInfo").state)
        descriptors = place.get("transform_descriptors")
        if descriptors is not None and values.sequence(descriptors):
            raise PickleError("its shards are compressed or encrypted by an extension of torch")
        file = files.setdefault(values.text(place.get("relative_path")), len(files))
        name = (values.text(where.get("fqn")), None if offset is None else shape_of(values, offset))
        if name in found:
            raise PickleError("a part has two places")
        found[name] = [file, values.integer(place.get("offset")), values.integer(place.get("length"))]
    return found


def _place_of(places: Places, key: str, offset: tuple[int, ...] | None) -> list[int]:
    place = places.get((key, offset))
    if place is None:
        raise PickleError(f"a part of {key!r} lies nowhere")
    return place


def _tensor(values: Values, key: str, made: Made, places: Places) -> dict[str, Any]:
    content = values.fields(made.state)
    chunks = []
    for node in values.sequence(content.get("chunks")):
        chunk = values.fields(values.called(node, "ChunkStorageMetadata").state)
        offsets, sizes = (shape_of(values, chunk.get(name)) for name in ("offsets", "sizes"))
        chunks.append([list(offsets), list(sizes), *_place_of(places, key, offsets)])
    return {
        "dtype": properties(values, content.get("properties")),
        "shape": list(shape_of(values, content.get("size"))),
        "chunks": chunks,
    }


def _reformulated(values: Values, node: Any) -> dict[str, list[int]]:
    found = {}
    for name, item in values.pairs(node) if isinstance(node, Pairs) else ():
        shape = values.fields(item).get(_NESTED) if isinstance(item, Pairs) else None
        if shape is not None:
            found[values.text(name)] = list(shape_of(values, shape))
    return found
