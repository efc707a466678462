"""A checkpoint from a stranger runs no code."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mindspeed_core.errors import CheckpointError
from mindspeed_core.hosts.standalone.checkpoint import security


class Attack:
    def __reduce__(self):
        return os.system, ("true",)


def index():
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([4]), [chunk])
    return Metadata(
        {"weight": tensor, "rng": BytesStorageMetadata()}, storage_data={MetadataIndex("weight"): 1}
    )


def archive(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_calls_os_system_is_refused_by_name(protocol):
    with pytest.raises(CheckpointError, match=r"somewhere: refers to (posix|nt)\.system.*--trust-checkpoint"):
        security.check_pickle(pickle.dumps([1, Attack()], protocol), "somewhere")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_index_of_shards_is_accepted(protocol):
    security.check_pickle(pickle.dumps(index(), protocol), "index")


def test_what_the_host_writes_is_accepted():
    value = {"step": 3, "rng": torch.get_rng_state(), "half": torch.zeros(2).half(), "d": OrderedDict(a=1)}
    security.check_archive(archive([value]), "object")


def test_an_archive_with_an_attack_is_refused():
    with pytest.raises(CheckpointError, match="system"):
        security.check_archive(archive({"x": Attack()}), "object")


def test_an_attribute_reached_through_an_allowed_module_is_refused():
    # protocol 4 looks up dotted names: torch.distributed.checkpoint.metadata imports other modules
    forged = b"\x80\x04\x8c\x29torch.distributed.checkpoint.metadata\x8c\x09os.system\x93."
    forged = forged.replace(b"\x8c\x29", bytes([0x8C, len("torch.distributed.checkpoint.metadata")]))
    with pytest.raises(CheckpointError, match=r"metadata\.os\.system"):
        security.check_pickle(forged, "index")


def test_a_computed_name_is_refused():
    # DUP makes the second operand something that is not spelled in the stream
    with pytest.raises(CheckpointError, match="computed"):
        security.check_pickle(b"\x80\x04\x8c\x02os2\x93.", "index")


def test_an_archive_with_two_pickles_is_refused():
    stream = archive({"x": 1})
    with zipfile.ZipFile(stream, "a") as extended:
        extended.writestr("other/data.pkl", pickle.dumps(1))
    stream.seek(0)
    with pytest.raises(CheckpointError, match="2 pickles"):
        security.check_archive(stream, "object")


def test_a_shard_outside_the_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="outside"):
        security.check_objects(tmp_path, [("rng", "../other", 0, 1)])


def refusal(check, content):
    try:
        check(content, "noise")
    except CheckpointError as error:
        return str(error)
    return "noise: harmless"


@given(st.binary(max_size=200))
def test_noise_is_refused_with_the_files_name_or_harmless(noise):
    assert refusal(security.check_pickle, noise).startswith("noise: ")
    assert refusal(security.check_archive, io.BytesIO(noise)).startswith("noise: ")
