"""Attacks on checkpoints that passed lists of names, rebuilt: each is refused by name."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import time
import zipfile
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp

from mindspeed_core.errors import CheckpointError
from mindspeed_train.checkpoint import index as checkpoint_index
from mindspeed_train.checkpoint import manifests, publish
from mindspeed_train.checkpoint.archive import read_archive
from mindspeed_train.checkpoint.common_state import check_agrees, check_common, check_description, read_common
from mindspeed_train.checkpoint.coverage import uncovered
from mindspeed_train.checkpoint.index import Chunk, Index, Place, TensorEntry, read_index
from mindspeed_train.checkpoint.inert_pickle import Record, read_pickle
from mindspeed_train.checkpoint.opened_files import Part
from mindspeed_train.checkpoint.pickled_classes import VALUES
from mindspeed_train.checkpoint.pickled_index import read_pickled_index
from mindspeed_train.checkpoint.rng_state import check as check_rng
from mindspeed_train.program import main

ROOT = Path(__file__).resolve().parents[4]


def text(value):
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def name(module, attribute):
    return b"c" + module.encode() + b"\n" + attribute.encode() + b"\n"


def built(target, attribute, value):
    """BUILD on ``target`` with the state ``(None, {attribute: value})``, which calls setattr in C."""
    return target + b"N}" + text(attribute) + value + b"s\x86b"


NAMESPACE = name("argparse", "Namespace")
STORAGE = name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
NUMPY = name("numpy", "dtype") + text("O") + b"\x89\x88\x87R"
UNFLAGGED = b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
DOUBLED = b")" + b"\x86".join([b"2"] * 2)
ATTACKS = {
    "a descriptor in argparse.Namespace": (
        b"\x80\x02" + built(NAMESPACE, "trust_checkpoint", b"\x88") + b".",
        r"sets the state of argparse\.Namespace",
    ),
    "a __setstate__ in _StorageInfo": (
        b"\x80\x02" + built(STORAGE, "__setstate__", name("builtins", "dict")) + b".",
        r"sets the state of torch\.distributed\.checkpoint\.filesystem\._StorageInfo",
    ),
    "a state in two parts": (
        b"\x80\x02" + built(NAMESPACE + b")\x81", "trust_checkpoint", b"\x88") + b".",
        "a tuple where a dictionary belongs",
    ),
    "a function of the list": (
        b"\x80\x02" + built(name("_codecs", "encode"), "x", b"K\x01") + b".",
        r"sets the state of _codecs\.encode",
    ),
    "numbers that are pointers": (
        b"\x80\x02"
        + name("numpy.core.multiarray", "_reconstruct")
        + name("numpy", "ndarray")
        + b"K\x00\x85"
        + text("b")
        + b"\x87R"
        + b"(K\x01K\x02\x85"
        + NUMPY
        + UNFLAGGED
        + b"\x89C\x10"
        + b"A" * 16
        + b"tb.",
        "numpy's type 'O', which is no number",
    ),
    "a number that is a pointer": (
        b"\x80\x03" + name("numpy.core.multiarray", "scalar") + NUMPY + b"C\x08" + b"A" * 8 + b"\x86R.",
        "numpy's type 'O', which is no number",
    ),
    "a key that takes for ever to hash": (
        b"\x80\x02}" + b")" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",
        "a tuple as a key|a key",
    ),
    "a value that takes for ever to walk": (
        b"\x80\x02)" + b"q\x00h\x00\x86" * 40 + b".",
        "far larger than the file",
    ),
    "an object that contains itself": (b"\x80\x02]q\x00h\x00a.", "contains itself"),
    "a length of 2**62": (
        b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b"x.",
        "but only|expected",
    ),
    "a call of a method": (
        b"\x80\x02(" + name("os", "system") + text("true") + b"o.",
        r"refers to (os|posix)\.system",
    ),
    "an old class": (b"(ios\nsystem\n.", "the operation INST"),
    "an extension": (b"\x80\x02\x82\x01.", "the operation EXT1"),
    "a deep list": (b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".", "nested more than"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_by_name_and_at_once(attack):
    content, words = ATTACKS[attack]
    begin = time.process_time()
    for read in (
        lambda: read_pickle(content, "file", VALUES),
        lambda: read_pickled_index(content, Path("file")),
        lambda: read_archive(Part.of(archive_of(content)), "file"),
    ):
        with pytest.raises(CheckpointError, match=r"^file: ") as refused:
            read()
    with pytest.raises(CheckpointError, match=words):
        read_pickled_index(content, Path("file"))
    assert "\x1b" not in str(refused.value)
    assert time.process_time() - begin < 5
    assert not hasattr(Namespace, "trust_checkpoint")


def archive_of(content):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr("archive/data.pkl", content)
        file.writestr("archive/version", "3\n")
    return stream.getvalue()


@pytest.mark.parametrize("attack", ATTACKS)
def test_inspect_refuses_an_attack_in_either_file(attack, tmp_path, capsys):
    folder = checkpoint(tmp_path)
    (folder / "common.pt").write_bytes(archive_of(ATTACKS[attack][0]))
    assert main(["inspect", str(folder)]) == 1
    assert "common.pt: " in capsys.readouterr().out
    (folder / "index.json").unlink()
    (folder / ".metadata").write_bytes(ATTACKS[attack][0])
    assert main(["inspect", str(folder)]) == 1
    assert ".metadata: " in capsys.readouterr().err


def test_a_trusted_pickle_becomes_records_and_runs_nothing(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    found = read_pickle(pickle.dumps([Attack()], 2), "file", VALUES, trusted=True)
    assert isinstance(found[0], Record)
    assert not (tmp_path / "ran").exists()


def test_numbers_of_numpy_are_read_as_they_were_written():
    values = [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([1, 2], dtype=">u2"),
        np.float64(2.5),
        np.random.get_state(legacy=True)[1],
    ]
    for protocol in range(2, 6):
        found = read_pickle(pickle.dumps(values, protocol), "file", VALUES)
        for was, now in zip(values, found):
            assert np.array_equal(was, now)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**64), 2**64)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=5)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=30,
)


@settings(deadline=None, max_examples=60)
@given(PLAIN, st.integers(2, 5))
def test_plain_values_are_read_as_pickle_reads_them(value, protocol):
    assert read_pickle(pickle.dumps(value, protocol), "file", VALUES) == value


@settings(deadline=None, max_examples=60)
@given(PLAIN)
def test_an_archive_of_plain_values_and_tensors_is_read_as_torch_reads_it(value):
    tensors = [
        torch.arange(12).reshape(3, 4).T,
        torch.ones(()),
        torch.zeros(0, 3),
        torch.ones(2, dtype=torch.bfloat16),
    ]
    stream = io.BytesIO()
    torch.save({"value": value, "tensors": [*tensors, tensors[0][1:]]}, stream)
    found = read_archive(Part.of(stream.getvalue()), "file")
    assert found["value"] == value
    for was, now in zip([*tensors, tensors[0][1:]], found["tensors"]):
        assert was.equal(now)
        assert was.dtype == now.dtype


def test_tensors_of_every_kind_that_torch_writes_are_read():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.sequence_parallel = True
    attributed = torch.arange(3)
    attributed.owner = "x"
    tensors = [
        parameter,
        attributed,
        torch.nn.Parameter(torch.zeros(3)),
        torch.ones(2, dtype=torch.float8_e5m2),
    ]
    tensors += [torch.ones(3, dtype=torch.uint16), torch.ones(2, dtype=torch.complex64)]
    stream = io.BytesIO()
    torch.save(tensors, stream)
    for was, now in zip(tensors, read_archive(Part.of(stream.getvalue()), "file")):
        assert (was.dtype, was.shape) == (now.dtype, now.shape)
        assert was.detach().view(torch.uint8).equal(now.view(torch.uint8))


# The index


def entry(shape, boxes):
    chunks, offset = [], 0
    for offsets, sizes in boxes:
        length = int(np.prod(sizes)) * 4 + 8
        chunks.append(Chunk(tuple(offsets), tuple(sizes), Place("a.distcp", offset, length)))
        offset += length
    return TensorEntry("float32", tuple(shape), tuple(chunks))


def checkpoint(folder, tensor=None, size=4096):
    """A checkpoint of one tensor, whose index is checked and whose shards nobody reads."""
    directory = folder / "iter_0000002"
    directory.mkdir()
    tensor = tensor or entry((4, 4), [((0, 0), (4, 4))])
    (directory / "index.json").write_text(checkpoint_index.describe(Index({"w": tensor}, {})))
    (directory / "a.distcp").write_bytes(bytes(size))
    torch.save({"iteration": 2}, directory / "common.pt")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')
    return directory


UNCOVERED = {
    "a part is missing": (entry((4, 4), [((0, 0), (2, 4))]), 4096, "leave 8 of its elements out"),
    "two parts overlap": (entry((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))]), 4096, "overlap"),
    "a part lies outside": (entry((4, 4), [((2, 0), (4, 4))]), 4096, "lie outside of it"),
    "another rank": (entry((4, 4), [((0,), (4,))]), 4096, "integers"),
    "beyond the file": (entry((4, 4), [((0, 0), (4, 4))]), 40, "places bytes up to 72"),
}


@pytest.mark.parametrize("case", UNCOVERED)
def test_an_index_that_does_not_cover_a_tensor_is_refused_before_anything_is_read(case, tmp_path, capsys):
    tensor, size, words = UNCOVERED[case]
    folder = checkpoint(tmp_path, tensor, size)
    with pytest.raises(CheckpointError, match=words):
        read_index(folder)
    assert main(["inspect", str(folder)]) == 1
    said = capsys.readouterr()
    assert words in said.out + said.err


def test_two_values_in_the_same_bytes_are_refused(tmp_path):
    folder = checkpoint(tmp_path)
    content = json.loads((folder / "index.json").read_text())
    content["objects"]["rng"] = [0, 8, 20]
    (folder / "index.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="two values in the same bytes"):
        read_index(folder)


HOSTILE = [None, -1, True, 10**30, 1e300, "x", [], {}, [[]], "../../etc/passwd", {"a": 1}, float("nan")]


def places_in(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places_in(item, (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def test_hostile_values_anywhere_in_an_index_are_refused_by_name_or_mean_nothing(tmp_path):
    folder = checkpoint(tmp_path)
    good = json.loads((folder / "index.json").read_text())
    refused = []
    for path in places_in(good):
        for value in HOSTILE:
            (folder / "index.json").write_text(json.dumps(replaced(good, path, value)))
            try:
                read_index(folder)
            except CheckpointError as error:
                refused.append(str(error))
    assert len(refused) > 150
    assert [text for text in refused if str(folder) not in text] == []


def test_deep_json_is_refused_by_the_files_name(tmp_path):
    folder = checkpoint(tmp_path)
    for name_, read in (
        ("metadata.json", check_description),
        ("index.json", read_index),
        ("manifest.json", manifests.read_manifest),
    ):
        (folder / name_).write_text("[" * 200_000)
        with pytest.raises(CheckpointError, match=f"{name_}: damaged.*nested too deeply"):
            read(folder)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.tuples(*(st.lists(st.integers(0, size), max_size=3) for size in shape)),
            st.integers(0),
        )
    )
)
def test_a_grid_tiles_a_shape_and_one_without_a_box_or_with_one_moved_does_not(drawn):
    shape, cuts, pick = drawn
    edges = [sorted({0, *cut, size}) for cut, size in zip(cuts, shape)]
    boxes = [((), ())]
    for axis in edges:
        boxes = [
            ((*at, begin), (*sizes, end - begin)) for at, sizes in boxes for begin, end in pairwise(axis)
        ]
    assert uncovered(shape, boxes) == ""
    without = boxes[: pick % len(boxes)] + boxes[pick % len(boxes) + 1 :]
    assert "leave" in uncovered(shape, without)
    assert uncovered(shape, [*without, boxes[(pick + 1) % len(boxes)]]) != "" or len(boxes) == 1


def test_an_irregular_tiling_is_accepted():
    spiral = [((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 0), (1, 2)), ((1, 1), (1, 1))]
    assert uncovered((3, 3), spiral) == ""


def test_thousands_of_irregular_parts_take_no_time():
    count = 3000
    stripes = [((row, 0), (1, row + 1)) for row in range(count)] + [
        ((row, row + 1), (1, count - row)) for row in range(count)
    ]
    begin = time.process_time()
    assert uncovered((count, count + 1), stripes) == ""
    assert time.process_time() - begin < 5


# Links


def test_a_link_that_leaves_the_checkpoint_is_refused_and_the_folder_itself_may_be_one(tmp_path):
    folder = checkpoint(tmp_path)
    (tmp_path / "linked").symlink_to(folder)
    assert read_index(tmp_path / "linked").tensors
    (folder / "a.distcp").rename(tmp_path / "secret")
    (folder / "a.distcp").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"a\.distcp: is a link to .*secret, outside the checkpoint"):
        read_index(folder)
    (folder / "a.distcp").unlink()
    (folder / "b.distcp").write_bytes(bytes(4096))
    (folder / "a.distcp").symlink_to("b.distcp")
    assert read_index(folder).tensors


def test_a_link_in_a_folder_of_checkpoints_that_leads_out_of_it_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "load").mkdir()
    folder = checkpoint(tmp_path / "elsewhere")
    manifest = manifests.Manifest(2, {})
    (folder / "manifest.json").write_text(manifests.describe(manifest))
    (tmp_path / "load" / "iter_0000002").symlink_to(folder)
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    assert publish.find(tmp_path / "linked").manifest == manifest
    for step in (None, 2):
        with pytest.raises(CheckpointError, match=r"iter_0000002: is a link to .*; name .*elsewhere instead"):
            publish.find(tmp_path / "load", step)


def test_common_state_and_manifest_have_to_agree(tmp_path):
    manifest = manifests.Manifest(2, {}, layout={"tp": 1, "pp": 2})
    check_agrees(tmp_path, GOOD, manifest)
    with pytest.raises(
        CheckpointError, match=r"common\.pt: layout is .*'pp': 2.*, and the manifest says .*'pp': 4"
    ):
        check_agrees(tmp_path, GOOD, manifests.Manifest(2, {}, layout={"tp": 1, "pp": 4}))


@pytest.mark.parametrize("name_", ["common.pt", "index.json", "metadata.json", "manifest.json"])
def test_every_file_of_a_checkpoint_is_held_to_that(name_, tmp_path):
    folder = checkpoint(tmp_path)
    (tmp_path / "secret").write_bytes((folder / name_).read_bytes() if (folder / name_).exists() else b"{}")
    (folder / name_).unlink(missing_ok=True)
    (folder / name_).symlink_to(tmp_path / "secret")
    read = {
        "common.pt": read_common,
        "index.json": read_index,
        "metadata.json": check_description,
        "manifest.json": manifests.read_manifest,
    }[name_]
    with pytest.raises(CheckpointError, match="is a link to"):
        read(folder)


# The common state

GOOD = {
    "iteration": 2,
    "checkpoint_version": 3.0,
    "consumed_train_samples": 8,
    "consumed_valid_samples": 0,
    "micro_batch_size": 2,
    "layout": {"tp": 1, "pp": 2},
    "args": Namespace(tensor_model_parallel_size=1, consumed_train_samples=8),
    "bad_steps": {"recent": [1.0], "in_a_row": 0},
    "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False},
    "opt_param_scheduler": {"max_lr": 0.1, "num_steps": 8, "lr_decay_style": "linear"},
    "optimizer": {
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "step": 2.0, "params": [0]}]}
    },
    "features": {},
}
WRONG = {
    "iteration": [-1, True, 10**12, 3, 2.0, "2", [2]],
    "consumed_train_samples": [-1, True, 2**60, 7, "8", {}],
    "consumed_valid_samples": [-1, True, 2**60, 0.5],
    "micro_batch_size": [0, -1, True, "2"],
    "layout": [[], {"tp": 0}, {"tp": True}, {"tp": "x"}, {"tp": 10**12}, {1: 1}, 7],
    "args": [Namespace(tensor_model_parallel_size=0), Namespace(consumed_train_samples=9), 7, [1]],
    "bad_steps": [
        [],
        {"recent": 1, "in_a_row": 0},
        {"recent": ["x"], "in_a_row": 0},
        {"recent": [], "in_a_row": -1},
    ],
    "content_metadata": [
        [],
        {"distrib_optim_sharding_type": "x"},
        {"distrib_optim_sharding_type": 1},
        {"singleton_local_shards": 3},
    ],
    "opt_param_scheduler": [
        [],
        {"num_steps": -1},
        {"num_steps": "x"},
        {"max_lr": float("nan")},
        {"max_lr": []},
        {"lr_decay_style": 1},
    ],
    "optimizer": [
        [],
        {"param_groups": 1},
        {0: {"param_groups": 1}},
        {"param_groups": [1]},
        {"param_groups": [{"lr": "x"}]},
        {"param_groups": [{"lr": float("inf")}]},
        {"param_groups": [{"betas": ("x",)}]},
        {"param_groups": [{"step": -1}]},
        {"param_groups": [{"params": ["x"]}]},
    ],
    "features": [[], 3, {1: 2}],
}


def test_common_state_as_it_is_written_passes():
    check_common(GOOD, "common.pt", 2)
    # Chained optimizers are numbered.
    check_common({**GOOD, "optimizer": {0: GOOD["optimizer"], 1: GOOD["optimizer"]}}, "common.pt", 2)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_a_field_of_the_wrong_type_or_out_of_range_is_refused_by_name(field, value):
    words = rf"^common\.pt: {field}.* has to be .*--ckpt-step|^common\.pt: args\.{field}.* has to be"
    with pytest.raises(CheckpointError, match=words):
        check_common({**GOOD, field: value}, "common.pt", 2)


def test_random_states_are_checked_before_a_generator_takes_them():
    import random

    good = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"default": torch.get_rng_state()},
    }
    check_rng([good], "rng")
    name_, words, position, *rest = np.random.get_state()
    for field, value in (
        ("np_rng_state", (name_, words, -7, *rest)),
        ("np_rng_state", (name_, words, 10**6, *rest)),
        ("np_rng_state", (name_, words[:9], position, *rest)),
        ("random_rng_state", (3, (1, 2), None)),
        ("torch_rng_state", torch.ones(3)),
        ("rng_tracker_states", {"default": 3}),
    ):
        with pytest.raises(CheckpointError, match=f"rng: {field}.* has to be"):
            check_rng([{**good, field: value}], "rng")


# No unpickler

_FORBIDDEN = {
    "pickle": {"load", "loads", "Unpickler"},
    "_pickle": {"load", "loads", "Unpickler"},
    "torch": {"load"},
    "np": {"load"},
    "numpy": {"load"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "dill": {"load", "loads"},
    "joblib": {"load"},
    "dcp": {"FileSystemReader"},
}
"""What runs code of a file, by its module. Torch's ``load`` is on it with ``weights_only`` too."""


def imported(path, package):
    """The modules of this project that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {module for module in found if module.startswith(package)}


def file_of(module):
    paths = [root / Path(*module.split(".")) for root in (ROOT, *ROOT.glob("*/*/src"))]
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


def reachable(*begin):
    seen, pending = {}, list(begin)
    while pending:
        module = pending.pop()
        path = file_of(module)
        if module in seen or path is None:
            continue
        seen[module] = path
        pending += imported(path, "mindspeed_")
    return seen


def unpickles(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in _FORBIDDEN.get(node.value.id, ()):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in _FORBIDDEN:
            bad = {alias.name for alias in node.names} & _FORBIDDEN[node.module]
            yield from (f"{path.relative_to(ROOT)}:{node.lineno} {node.module}.{name_}" for name_ in bad)


HANDS_ON = {
    "packages/mindspeed_train/src/mindspeed_train/checkpoint/shard_reader.py torch.load",
    "packages/mindspeed_train/src/mindspeed_train/data/index_cache.py np.load",
    "packages/mindspeed_megatron/src/mindspeed_megatron/devices/device_arguments.py torch.load",
}
"""Places that name such a function to take it away from others, or to hand arguments on."""


def test_no_unpickler_is_reachable_from_loading_or_looking_at_a_checkpoint():
    package = "mindspeed_train.checkpoint"
    modules = reachable(
        f"{package}.load", f"{package}.inspection", f"{package}.source", f"{package}.inspected_store"
    )
    assert f"{package}.inert_pickle" in modules
    assert len(modules) > 40
    found = {
        f"{line.partition(':')[0]} {line.rpartition(' ')[2]}"
        for path in modules.values()
        for line in unpickles(path)
    }
    assert found <= HANDS_ON


def test_a_load_raises_no_event_of_an_unpickler(tmp_path):
    import sys

    dcp.save({"w": torch.ones(4), "o": [1]}, checkpoint_id=tmp_path, no_dist=True)
    seen = []
    watching = [True]
    sys.addaudithook(
        lambda event, _: seen.append(event) if watching and event.startswith("pickle.") else None
    )
    from mindspeed_train.checkpoint.shard_reader import ShardReader

    dcp.load(
        {"w": torch.zeros(4), "o": [0]},
        storage_reader=ShardReader(tmp_path, read_index(tmp_path)),
        no_dist=True,
    )
    watching.clear()
    assert seen == []
