"""The published repositories that contracts were read from, at the commits that were read."""

from __future__ import annotations

from mindspeed_testing.npu.kernels.contract import Source

_READ = "2026-11-22"


def ops_transformer(path: str) -> Source:
    """Return a file of CANN's kernels for transformers."""
    return Source("ops-transformer", path, "c29bc1069d3252c641e2aa059ec88f392d3f05ac", _READ)


def op_plugin(path: str) -> Source:
    """Return a file of torch_npu's bindings."""
    return Source("op-plugin", path, "517f2e7d0f202f38b76310706cb977ca2388ad21", _READ)


def atb(path: str) -> Source:
    """Return a file of the Ascend Transformer Boost library."""
    return Source("ascend-transformer-boost", path, "ddcc8b6225b8b7d4703c69c319244bdea0f0c9a1", _READ)
