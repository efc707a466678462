"""Archives written without torch: byte for byte those of ``torch.save``, hashed as they are written."""

from __future__ import annotations

import hashlib
import io
import zipfile

import pytest
import torch

from mindspeed_core.errors import CheckpointError
from mindspeed_train.checkpoint.archive import find_tensor, read_archive
from mindspeed_train.checkpoint.archive_layout import members
from mindspeed_train.checkpoint.opened_files import Part
from mindspeed_train.checkpoint.reasons import reason_of
from mindspeed_train.checkpoint.shard_files import ShardFile, length_of, write_files
from mindspeed_train.checkpoint.tensor_archive import around

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.float8_e4m3fn,
]


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def written(tmp_path, *items, shared=None):
    digests = write_files(tmp_path, [ShardFile("file", items)], shared=shared)
    content = (tmp_path / "file").read_bytes()
    assert digests == {"file": (len(content), hashlib.sha256(content).hexdigest())}
    assert len(content) == sum(map(length_of, items))
    return content


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 3), (300_000,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_archive_is_read_by_torch_and_by_every_reader_of_zip_files(tmp_path, dtype, shape):
    tensor = torch.arange(torch.Size(shape).numel()).remainder(2).to(dtype).reshape(shape)
    before, after = around(shape, dtype)
    content = written(tmp_path, (before, bytes_of(tensor), *after))
    assert "data/0" in members(Part.of(content))
    ours = read_archive(Part.of(content), "archive")
    assert (ours.dtype, ours.shape) == (dtype, tensor.shape)
    assert bytes_of(ours).tobytes() == bytes_of(tensor).tobytes()
    place = find_tensor(Part.of(content), "archive")
    assert content[place.begin :][: tensor.nbytes] == bytes_of(tensor).tobytes()
    loaded = torch.load(io.BytesIO(content), weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (dtype, tensor.shape, tensor.stride())
    assert bytes_of(loaded).tobytes() == bytes_of(tensor).tobytes()
    archive = zipfile.ZipFile(io.BytesIO(content))
    assert archive.testzip() is None
    torch.save(tensor.clone(), tmp_path / "torch")
    with zipfile.ZipFile(tmp_path / "torch") as theirs:
        assert archive.read("archive/data.pkl") == theirs.read("torch/data.pkl")


def test_an_archive_beyond_four_gigabytes_says_its_size():
    before, after = around((5 << 30,), torch.uint8)
    assert before.endswith((5 << 30).to_bytes(8, "little") * 2)
    assert after[2].startswith((5 << 30).to_bytes(8, "little") * 2)


def test_pieces_in_shared_memory_are_the_bytes_there(tmp_path):
    shared = memoryview(bytes(range(200)))
    here = written(tmp_path, (b"a", shared[10:60], None, b"b"), (b"c",))
    assert written(tmp_path, (b"a", (10, 50), None, b"b"), (b"c",), shared=shared) == here


def test_a_refused_write_names_the_file(tmp_path):
    with pytest.raises(OSError, match="Is a directory") as caught:
        write_files(tmp_path.parent, [ShardFile(tmp_path.name, [(b"x",)])])
    assert str(tmp_path) in caught.value.filename


def test_reasons_name_what_the_system_said():
    wrapped = RuntimeError("a library gave up")
    wrapped.__cause__ = OSError(28, "No space left on device", "/disk/file")
    assert "no space left on the device (/disk/file)" in reason_of(wrapped)
    assert reason_of(ValueError("odd")) == "ValueError: odd"
    assert reason_of(CheckpointError("whole sentence")) == "\0whole sentence"
