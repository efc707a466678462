"""Hostile files of every kind that is read: each maker writes them, and names the reader to be tried."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pickle_grammar import Grammar
from torch.distributed import checkpoint as dcp

from mindspeed_megatron.plan_resume import compare_plans
from mindspeed_train.checkpoint import common_state, index, manifests
from mindspeed_train.checkpoint.archive import find_tensor, read_archive
from mindspeed_train.checkpoint.opened_files import Part, read_inside
from mindspeed_train.checkpoint.shard_reader import ShardReader
from mindspeed_train.data.files import check_dataset_files, token_counts, write_index
from mindspeed_train.data.index_cache import is_complete, load_array
from mindspeed_train.data.sources import data_sources
from mindspeed_train.text.tokenizer import load_tokenizer, train_tokenizer

Read = Callable[[], Any]
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    10**30,
    1e300,
    float("nan"),
    "",
    "x",
    "../../etc/passwd",
    "/etc/passwd",
    "a\0b",
    "\x1b[2J",
    "\u202e",
    [],
    {},
    [[]],
    {"a": {"b": []}},
    [1, 2, 3],
]


class Good:
    """Files as they are written, to be altered."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        state = {
            "w": torch.arange(12.0).reshape(3, 4),
            "b": torch.ones(4, dtype=torch.bfloat16),
            "o": {"a": [1, 2]},
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=folder, no_dist=True)
        self.metadata = (folder / ".metadata").read_bytes()
        (shard,) = folder.glob("*.distcp")
        self.shard_name, self.shard = shard.name, shard.read_bytes()
        self.index = json.loads(index.describe(index.read_index(folder)))
        common = io.BytesIO()
        torch.save({"iteration": 2, "layout": {"tp": 1}, "t": torch.ones(3), "n": np.arange(4)}, common)
        self.common = common.getvalue()
        manifest = manifests.Manifest(2, {"common.pt": (3, "0" * 64)}, plan={"features": [{"name": "x"}]})
        self.manifest = json.loads(manifests.describe(manifest))
        tokens = np.arange(30, dtype=np.uint16)
        tokens.tofile(folder / "d.bin")
        write_index(folder / "d.idx", np.array([10, 12, 8], dtype=np.int32), np.dtype(np.uint16))
        self.tokens, self.idx = (folder / "d.bin").read_bytes(), (folder / "d.idx").read_bytes()
        train_tokenizer(["a text of words and words"] * 5, 300).save(folder / "tokenizer.json")
        self.tokenizer = (folder / "tokenizer.json").read_bytes()
        array = io.BytesIO()
        np.save(array, np.arange(9))
        self.array = array.getvalue()


def case_of(good: Good, draw: random.Random, folder: Path) -> Read:
    """Write the files of one case; return what reads them."""
    return draw.choice(_MAKERS)(good, draw, folder)


def _altered(draw: random.Random, content: bytes) -> bytes:
    """Return bytes with some changed, cut off, or put in."""
    found = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 8])):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(4)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            found[at : at + 8] = draw.choice(
                [b"\xff" * 8, bytes(8), struct.pack("<Q", 2**62), draw.randbytes(8)]
            )
        elif kind == 2:
            del found[at : at + draw.choice([1, 8, 100, 10**6])]
        else:
            found[at:at] = draw.randbytes(draw.choice([1, 4, 64]))
    return bytes(found)


def _replaced(draw: random.Random, value: Any) -> Any:
    """Return a value with a hostile one anywhere in it."""
    if not isinstance(value, (dict, list)) or not value or draw.random() < 0.15:
        return draw.choice(HOSTILE)
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    key = draw.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
    copy[key] = _replaced(draw, copy[key])
    if isinstance(copy, dict) and draw.random() < 0.1:
        copy[draw.choice(["x", "", "\x1b[2J", "../y"])] = copy.pop(key)
    return copy


def _json(draw: random.Random, value: Any) -> bytes:
    kind = draw.random()
    if kind < 0.05:
        return draw.choice(
            [b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"", b"9" * 10_000, b'{"a":1,"a":2}']
        )
    content = json.dumps(_replaced(draw, value)).encode()
    return _altered(draw, content) if kind < 0.25 else content


def _archive(draw: random.Random, content: bytes) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as file:
        warnings.simplefilter("ignore")
        for name, part in (
            ("a/data.pkl", content),
            ("a/version", b"3\n"),
            ("a/data/0", bytes(draw.choice([0, 8, 32]))),
        ):
            file.writestr(name, part)
    return stream.getvalue()


def _checkpoint(good: Good, folder: Path, **files: bytes) -> None:
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')
    (folder / "common.pt").write_bytes(files.get("common", good.common))
    (folder / ".metadata").write_bytes(files.get("metadata", good.metadata))
    (folder / good.shard_name).write_bytes(files.get("shard", good.shard))


def _loaded(folder: Path) -> Any:
    """Load tensors and objects of a checkpoint as a run does."""
    found = index.read_index(folder)
    reader = ShardReader(folder, found)
    reader.check_objects(found.objects, lambda key, value, where: None)
    target: dict[str, Any] = {"w": torch.zeros(3, 4), "b": torch.zeros(4, dtype=torch.bfloat16)}
    # A run compares keys and shapes with its model before.
    target = {key: value for key, value in target.items() if key in found.tensors}
    target = {key: value for key, value in target.items() if found.tensors[key].shape == value.shape}
    dcp.load(target, storage_reader=reader, no_dist=True)
    return target


def _pickled_index(good: Good, draw: random.Random, folder: Path) -> Read:
    made = Grammar(draw).pickle() if draw.random() < 0.7 else _altered(draw, good.metadata)
    _checkpoint(good, folder, metadata=made)
    return lambda: index.read_index(folder)


def _foreign_objects(good: Good, draw: random.Random, folder: Path) -> Read:
    """An index of torch whose states are others."""
    found = pickle.loads(good.metadata)
    entries = [found, *found.state_dict_metadata.values(), *found.storage_data.values(), *found.storage_data]
    entries += [chunk for entry in entries for chunk in getattr(entry, "chunks", [])]
    for _ in range(draw.randrange(1, 3)):
        fields = vars(draw.choice(entries))
        if fields:
            fields[draw.choice(sorted(fields))] = draw.choice(
                [*HOSTILE, torch.float32, torch.Size([2]), found]
            )
    try:
        content = pickle.dumps(found, draw.randrange(2, 6))
    except Exception:
        content = good.metadata
    _checkpoint(good, folder, metadata=content)
    return lambda: _loaded(folder)


def _common(good: Good, draw: random.Random, folder: Path) -> Read:
    made = _altered(draw, good.common) if draw.random() < 0.3 else _archive(draw, Grammar(draw).pickle())
    _checkpoint(good, folder, common=made)
    return lambda: common_state.read_common(folder)


def _object(good: Good, draw: random.Random, folder: Path) -> Read:
    content = _archive(draw, Grammar(draw).pickle())
    read = draw.choice([read_archive, find_tensor])
    (folder / "shard").write_bytes(content)
    return lambda: read(Part.of(read_inside(folder, "shard")), str(folder / "shard"))


def _shard(good: Good, draw: random.Random, folder: Path) -> Read:
    _checkpoint(good, folder, shard=_altered(draw, good.shard))
    return lambda: _loaded(folder)


def _own_index(good: Good, draw: random.Random, folder: Path) -> Read:
    _checkpoint(good, folder)
    (folder / "index.json").write_bytes(_json(draw, good.index))
    return lambda: _loaded(folder)


def _manifest(good: Good, draw: random.Random, folder: Path) -> Read:
    changed = _replaced(draw, good.manifest)
    if isinstance(changed, dict) and draw.random() < 0.7:
        changed.pop("digest", None)
    (folder / "manifest.json").write_bytes(
        json.dumps(changed).encode() if draw.random() < 0.8 else _json(draw, good.manifest)
    )

    def read() -> Any:
        manifest = manifests.read_manifest(folder)
        compare_plans(manifest.plan, {"features": [{"name": "y"}]}, {})
        return list(manifests.check_files(folder, manifest, manifest.files, contents=True))

    return read


def _description(good: Good, draw: random.Random, folder: Path) -> Read:
    known = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_bytes(_json(draw, known))
    return lambda: common_state.check_description(folder)


def _dataset(good: Good, draw: random.Random, folder: Path) -> Read:
    (folder / "d.bin").write_bytes(good.tokens if draw.random() < 0.8 else _altered(draw, good.tokens))
    (folder / "d.idx").write_bytes(_altered(draw, good.idx))

    def read() -> Any:
        check_dataset_files(folder / "d")
        return token_counts(folder / "d")

    return read


def _cache(good: Good, draw: random.Random, folder: Path) -> Read:
    (folder / "a.npy").write_bytes(_altered(draw, good.array))
    (folder / "description.txt").touch()
    return lambda: is_complete(folder, "", ["a.npy"]) and load_array(folder / "a.npy").sum()


def _tokenizer(good: Good, draw: random.Random, folder: Path) -> Read:
    made = _altered(draw, good.tokenizer) if draw.random() < 0.3 else _json(draw, json.loads(good.tokenizer))
    (folder / "tokenizer.json").write_bytes(made)
    return lambda: load_tokenizer(folder / "tokenizer.json").tokenize("some words")


def _sources(good: Good, draw: random.Random, folder: Path) -> Read:
    from argparse import Namespace

    (folder / "blend.json").write_bytes(_json(draw, {"train": ["1", "x"], "valid": ["1", "y"]}))
    names = "data_path data_args_path train_data_path valid_data_path test_data_path mock_data".split()
    args = Namespace(**dict.fromkeys(names), per_split_data_args_path=str(folder / "blend.json"))
    return lambda: data_sources(args)


_MAKERS: list[Callable[[Good, random.Random, Path], Read]] = [
    _pickled_index,
    _pickled_index,
    _foreign_objects,
    _common,
    _common,
    _object,
    _object,
    _shard,
    _own_index,
    _own_index,
    _manifest,
    _description,
    _dataset,
    _cache,
    _tokenizer,
    _sources,
]
