"""The published repositories that contracts were read from, at the commits that were read."""

from __future__ import annotations

from mindspeed_testing.npu.kernels.contract import Source

_READ, _READ_LATER = "2026-11-22", "2026-11-23"


def ops_transformer(path: str) -> Source:
    """Return a file of CANN's kernels for transformers."""
    return Source("ops-transformer", path, "c29bc1069d3252c641e2aa059ec88f392d3f05ac", _READ)


def later_ops_transformer(path: str, commit: str) -> Source:
    """Return a file of CANN's kernels for transformers at a later commit, its last one."""
    return Source("ops-transformer", path, commit, _READ_LATER)


def ops_nn(path: str) -> Source:
    """Return a file of CANN's kernels for neural networks."""
    return Source("ops-nn", path, "e5c3fa9327ea95ba26d06227e746923580d10921", _READ_LATER)


def op_plugin(path: str) -> Source:
    """Return a file of torch_npu's bindings."""
    return Source("op-plugin", path, "517f2e7d0f202f38b76310706cb977ca2388ad21", _READ)


def atb(path: str) -> Source:
    """Return a file of the Ascend Transformer Boost library."""
    return Source("ascend-transformer-boost", path, "ddcc8b6225b8b7d4703c69c319244bdea0f0c9a1", _READ)
