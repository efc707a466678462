"""A safetensors file whose tensors are written one after the other, behind a header that is known before."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from mindspeed_models.weights.safetensors_file import NAMES, bytes_of
from mindspeed_models.weights.unfinished import DigestedFile

Described = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Dtype and shape of each tensor by name, in the order of the file."""


def header(tensors: Described) -> bytes:
    """Return the beginning of a file: length and header, with transformers' mark of PyTorch's layout."""
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + dtype.itemsize * math.prod(shape)
        content[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    # The library aligns the tensors' bytes to eight.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, tensors: Described, parts: Iterable[torch.Tensor]) -> int:
    """Write a file and force it to disk.

    Args:
        path: the file.
        tensors: what it holds.
        parts: its tensors' elements in order, in pieces of any size.

    Returns:
        Its size in bytes.
    """
    file = DigestedFile(path)
    try:
        file.write(header(tensors))
        for part in parts:
            file.write(bytes_of(part.contiguous()))
    except BaseException:
        file.abort()
        raise
    return file.close()[0]
