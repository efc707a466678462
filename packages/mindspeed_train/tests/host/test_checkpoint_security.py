"""A checkpoint from a stranger runs no code."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mindspeed_core.errors import CheckpointError
from mindspeed_core.platforms import process_memory
from mindspeed_train.checkpoint.archive import read_archive
from mindspeed_train.checkpoint.archive_layout import LayoutError, members
from mindspeed_train.checkpoint.common_state import read_common
from mindspeed_train.checkpoint.index import read_index
from mindspeed_train.checkpoint.inert_pickle import read_pickle
from mindspeed_train.checkpoint.opened_files import Part
from mindspeed_train.checkpoint.pickled_classes import VALUES
from mindspeed_train.checkpoint.pickled_index import read_pickled_index
from mindspeed_train.checkpoint.shard_reader import ShardReader, read_object, the_only_reader

ran = []


def run_foreign_code(what):
    """Record that an attack was executed."""
    ran.append(what)
    return what


class Attack:
    def __reduce__(self):
        return run_foreign_code, ("attack",)


@pytest.fixture(autouse=True)
def nothing_ran():
    ran.clear()
    yield
    assert ran == []


def index():
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([4]), [chunk])
    places = {
        MetadataIndex("weight", torch.Size([0])): filesystem._StorageInfo("__0_0.distcp", 0, 1200),
        MetadataIndex("rng"): filesystem._StorageInfo("__0_0.distcp", 1200, 30),
    }
    return Metadata({"weight": tensor, "rng": BytesStorageMetadata()}, storage_data=places)


def archive(value, protocol=2):
    stream = io.BytesIO()
    torch.save(value, stream, pickle_protocol=protocol)
    return stream.getvalue()


def rewritten(members):
    """An archive with these members, by a program that is not torch."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name, content in members:
            file.writestr(name, content)
    return stream.getvalue()


def members_of(content):
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return [(name, file.read(name)) for name in file.namelist()]


def load_pickle(content, where):
    return read_pickle(content, where, VALUES)


def load_archive(content, where):
    return read_archive(Part.of(content), where)


GOOD = archive({"a": torch.arange(3), "step": 3})
EVIL = archive({"x": Attack()})


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_names_a_foreign_function_is_refused_by_name(protocol):
    wanted = r"somewhere: refers to .*\.run_foreign_code.*--trust-checkpoint"
    with pytest.raises(CheckpointError, match=wanted):
        load_pickle(pickle.dumps([1, Attack()], protocol), "somewhere")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_index_of_shards_is_read(protocol):
    assert read_pickled_index(pickle.dumps(index(), protocol), Path("index")) == {
        "format": "mindspeed-index-1",
        "files": ["__0_0.distcp"],
        "tensors": {"weight": {"dtype": "bfloat16", "shape": [4], "chunks": [[[0], [4], 0, 0, 1200]]}},
        "objects": {"rng": [0, 1200, 30]},
        "reformulated": {},
    }


def test_what_the_host_writes_is_read():
    value = {"step": 3, "rng": torch.get_rng_state(), "d": OrderedDict(a=1), "s": {1, 2}, "b": b"bytes"}
    found = load_archive(archive([value]), "object")[0]
    assert found["rng"].equal(value["rng"])
    assert {name: found[name] for name in "dsb"} == {name: value[name] for name in "dsb"}


def test_an_archive_with_an_attack_is_refused():
    with pytest.raises(CheckpointError, match=r"object: refers to .*run_foreign_code"):
        load_archive(EVIL, "object")


def test_an_attribute_reached_through_an_allowed_module_is_refused():
    # protocol 4 looks up dotted names: torch.distributed.checkpoint.metadata imports other modules
    module = b"torch.distributed.checkpoint.metadata"
    forged = b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c\x09os.system\x93."
    with pytest.raises(CheckpointError, match=r"metadata\.os\.system"):
        load_pickle(forged, "index")


def test_a_listed_name_split_in_another_place_is_refused():
    forged = b"\x80\x04\x8c\x05torch\x8c\x12_utils._rebuild_tensor\x93."
    forged = forged.replace(b"\x12", bytes([len("_utils._rebuild_tensor")]))
    with pytest.raises(CheckpointError, match=r"torch\._utils\._rebuild_tensor"):
        load_pickle(forged, "index")


def test_a_pickle_with_something_behind_it_is_refused():
    with pytest.raises(CheckpointError, match="something follows the pickle"):
        load_pickle(pickle.dumps(1) + pickle.dumps(Attack()), "index")


def two_directories(good, evil):
    """Two archives in one: their readers begin at opposite ends."""
    begin = struct.unpack("<I", evil[-6:-2])[0]
    tail = evil[-22:-6] + struct.pack("<IH", begin, 0)
    return evil + good[: len(good) - 22] + tail


def renamed(content, name):
    return content.replace(b"data.pkl", name)


FORGED = {
    "a pickle before it": lambda: pickle.dumps(Attack()) + GOOD,
    "an archive before it": lambda: EVIL + GOOD,
    "an archive behind it": lambda: GOOD + EVIL,
    "two directories": lambda: two_directories(GOOD, EVIL),
    "a directory of the other": lambda: GOOD[:-22] + EVIL[-22:],
    "a name in capitals": lambda: renamed(EVIL, b"DATA.PKL"),
    "both spellings": lambda: rewritten(
        [*members_of(GOOD), ("archive/DATA.PKL", dict(members_of(EVIL))["archive/data.pkl"])]
    ),
    "two pickles": lambda: rewritten([*members_of(GOOD), ("other/data.pkl", pickle.dumps(Attack()))]),
    "a script": lambda: rewritten(
        [*members_of(GOOD), ("archive/constants.pkl", b"\x80\x02)."), ("archive/code/x.py", b"x")]
    ),
    "a comment": lambda: GOOD[:-2] + struct.pack("<H", 22) + EVIL[-22:],
    "a gap": lambda: GOOD[:100] + bytes(16) + GOOD[100:],
    "the legacy format": lambda: legacy(Attack()),
    "a bare pickle": lambda: pickle.dumps(Attack()),
    "nothing": lambda: b"",
}


def legacy(value):
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


@pytest.mark.parametrize("name", FORGED)
def test_an_archive_that_can_be_read_in_two_ways_is_refused(name):
    with pytest.raises(CheckpointError, match=r"^object: "):
        load_archive(FORGED[name](), "object")


@pytest.mark.parametrize("name", FORGED)
def test_common_state_that_can_be_read_in_two_ways_is_refused(name, tmp_path):
    (tmp_path / "common.pt").write_bytes(FORGED[name]())
    with pytest.raises(CheckpointError, match=r"common\.pt: cannot be read"):
        read_common(tmp_path)


def test_common_state_that_names_a_foreign_function_is_refused_by_name(tmp_path):
    (tmp_path / "common.pt").write_bytes(EVIL)
    with pytest.raises(CheckpointError, match=r"refers to .*run_foreign_code.*--trust-checkpoint"):
        read_common(tmp_path)


@pytest.mark.parametrize("where", ["index", "object"])
def test_a_foreign_function_in_a_checkpoint_of_torch_is_refused(where, tmp_path):
    dcp.save({"weight": torch.ones(4), "value": {"a": 1}}, checkpoint_id=tmp_path, no_dist=True)
    if where == "index":
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Attack()))
    else:
        with_object(tmp_path, EVIL)
    target = {"weight": torch.zeros(4), "value": {"a": 0}}
    with pytest.raises(BaseException, match="run_foreign_code"):
        dcp.load(target, storage_reader=ShardReader(tmp_path, read_index(tmp_path)), no_dist=True)


def test_a_checkpoint_of_torch_is_read(tmp_path):
    weights = {"weight": torch.ones(4), "wide": torch.arange(12.0).reshape(3, 4).T, "value": {"a": 1}}
    dcp.save(weights, checkpoint_id=tmp_path, no_dist=True)
    target = {"weight": torch.zeros(4), "wide": torch.zeros(4, 3, dtype=torch.float64), "value": {"a": 0}}
    dcp.load(target, storage_reader=ShardReader(tmp_path, read_index(tmp_path)), no_dist=True)
    assert target["weight"].sum() == 4
    assert target["wide"].equal(weights["wide"].double())
    assert target["value"] == {"a": 1}


def test_while_a_checkpoint_is_read_torch_unpickles_nothing_and_is_put_back_afterwards(tmp_path):
    before = torch.load, filesystem.pickle
    dcp.save({"weight": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    with the_only_reader(ShardReader(tmp_path, read_index(tmp_path))):
        with pytest.raises(CheckpointError, match="about to be unpickled"):
            torch.load(io.BytesIO(GOOD))
        with pytest.raises(CheckpointError, match="about to be unpickled"):
            dcp.FileSystemReader(str(tmp_path)).read_metadata()
    assert (torch.load, filesystem.pickle) == before


def with_object(folder, content):
    """Put an archive in the place of the checkpoint's object."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    for place, info in found.storage_data.items():
        if isinstance(found.state_dict_metadata[place.fqn], BytesStorageMetadata):
            file = folder / info.relative_path
            info.offset, info.length = file.stat().st_size, len(content)
            with file.open("ab") as stream:
                stream.write(content)
    path.write_bytes(pickle.dumps(found))


def test_objects_are_looked_at_before_tensors_are_read(tmp_path):
    dcp.save({"weight": torch.ones(4), "value": [1]}, checkpoint_id=tmp_path, no_dist=True)
    with_object(tmp_path, EVIL)
    index = read_index(tmp_path)
    with pytest.raises(CheckpointError, match=r"distcp, object 'value.*': refers to .*run_foreign_code"):
        ShardReader(tmp_path, index).check_objects(index.objects, lambda key, value, where: None)


def test_bytes_that_a_layer_would_unpickle_are_refused_unless_they_are_trusted():
    part = Part.of(archive([torch.ones(3, dtype=torch.uint8)]))
    with pytest.raises(CheckpointError, match=r"TransformerEngine unpickles itself.*--trust-checkpoint"):
        read_object(part, "decoder.layers.linear._extra_state/shard_0_1", "object")
    for key, trusted in (("decoder._extra_state/shard_0_1", True), ("features.mine/shard_0_1", False)):
        assert read_object(part, key, "object", trusted=trusted)[0].sum() == 3


def refusal(load, content):
    try:
        load(content, "noise")
    except CheckpointError as error:
        return str(error)
    return "noise: harmless"


@given(st.binary(max_size=200))
def test_noise_is_refused_with_the_files_name_or_harmless(noise):
    assert refusal(load_pickle, noise).startswith("noise: ")
    assert refusal(load_archive, noise).startswith("noise: ")


@pytest.mark.parametrize(
    "keeping", [b"Nr\xff\xff\xff\xff.", b"Np99999999999\n.", b"\x96\xff\xff\xff\xff\xff\xff\xff\x0f."]
)
@pytest.mark.parametrize("load", [load_pickle, load_archive])
def test_no_pickle_of_a_few_bytes_takes_the_memory_of_the_machine(keeping, load):
    content = rewritten([("archive/version", b"3\n"), ("archive/data.pkl", keeping)])
    # From the peak of earlier tests on, a smaller one would not show.
    process_memory.reset_peak()
    before = process_memory.peak_resident_bytes()

    found = refusal(load, content if load is load_archive else keeping)

    assert found == "noise: harmless" or "bytearray8" in found
    assert process_memory.peak_resident_bytes() - before < 100 << 20


def test_a_pickle_may_keep_an_object_under_every_number_that_its_objects_reach():
    values = [[number] for number in range(70_000)]

    assert load_pickle(pickle.dumps(values, protocol=2), "values") == values


def mutated(draw):
    """An archive with an attack in it, in a form that some reader might take."""
    protocol = draw.randrange(pickle.HIGHEST_PROTOCOL + 1)
    payload = draw.choice([Attack(), [1, Attack()], {"state": (Attack(),)}, torch.ones(2)])
    name = draw.choice(["data.pkl", "DATA.PKL", "Data.pkl", "data.pkl/", "./data.pkl", "data.pkl\0"])
    members = [("archive/version", b"3\n"), (f"archive/{name}", pickle.dumps(payload, protocol))]
    if draw.random() < 0.5:
        members += members_of(GOOD)
    draw.shuffle(members)
    forged = draw.choice([EVIL, archive(payload, max(2, protocol)), rewritten(members), legacy(payload)])
    for _ in range(draw.randrange(4)):
        forged = draw.choice(CHANGES)(draw, forged)
    return forged


def flipped(draw, content):
    changed = bytearray(content or b"\0")
    for _ in range(draw.randrange(1, 6)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def with_other_end(draw, content):
    end = bytearray(content[-22:].ljust(22, b"\0"))
    struct.pack_into("<I", end, 16, draw.choice([0, len(GOOD), draw.randrange(2**32)]))
    return content[:-22] + bytes(end)


CHANGES = (
    flipped,
    with_other_end,
    lambda draw, content: pickle.dumps(Attack(), draw.randrange(6)) + content,
    lambda draw, content: GOOD + content,
    lambda draw, content: content + GOOD,
    lambda draw, content: content[: draw.randrange(len(content) + 1)],
    lambda draw, content: content + content[-22:],
    lambda draw, content: two_directories(GOOD, content) if len(content) > 22 else content,
    lambda draw, content: content.replace(b"data.pkl", draw.choice([b"DATA.PKL", b"data.pkL"])),
    lambda draw, content: content.replace(b"run_foreign_code", b"run_foreign_cod\xc3"),
)


def attack_with(seeds, folder):
    for seed in seeds:
        forged = mutated(random.Random(seed))
        for load in (load_pickle, load_archive):
            refusal(load, forged)
        (folder / "common.pt").write_bytes(forged)
        refusal(lambda _, where: read_common(folder), forged)
        assert ran == [], f"seed {seed}"


def test_a_hundred_forged_archives_run_nothing(tmp_path):
    attack_with(range(100), tmp_path)


@pytest.mark.thorough
def test_two_thousand_forged_archives_run_nothing(tmp_path):
    attack_with(range(100, 2100), tmp_path)


def test_the_forged_archives_would_run_code_in_another_reader():
    done = 0
    for seed in range(100):
        with contextlib.suppress(Exception):
            torch.load(io.BytesIO(mutated(random.Random(seed))), weights_only=False)
        done += bool(ran)
        ran.clear()
    assert done > 20


@given(st.binary(min_size=1, max_size=40), st.integers(0, len(GOOD)))
def test_an_archive_with_bytes_put_in_is_no_archive_of_torch(noise, at):
    with pytest.raises(LayoutError):
        members(Part.of(GOOD[:at] + noise + GOOD[at:]))
