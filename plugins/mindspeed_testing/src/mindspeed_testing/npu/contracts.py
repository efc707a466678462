"""Tests of contracts: the record of a test that computed with each kernel, and its comparison.

The record is written by the same run that reaches every use of torch_npu. Reference pages are made from it,
where torch_npu is not installed.
"""

from __future__ import annotations

import json
from pathlib import Path

UNUSED = {
    "the gradient of the KL loss of an indexer over every key": ("npu_dense_lightning_indexer_grad_kl_loss",),
    "grouped products in MX formats that add to a gradient": ("npu_add_quant_gmm_",),
    "sparse flash attention": ("npu_sparse_flash_attention", "npu_sparse_flash_attention_grad"),
}
"""Kernels of torch_npu for large models that nothing here calls, so that no contract of them is written."""


def untested() -> list[str]:
    """Return what is wrong with the kernels themselves, one line each: no test, or no published source."""
    from mindspeed_testing.npu.device import COMPUTED
    from mindspeed_testing.npu.kernels import all_kernels

    found = [f"{name} has a contract, and no test computed with it" for name in missing(COMPUTED)]
    return found + [f"{k.operation} names no source" for k in all_kernels().values() if not k.sources]


def missing(computed: dict[str, str]) -> list[str]:
    """Return the operations with a contract that are not in a record."""
    from mindspeed_testing.npu.kernels import all_kernels

    return sorted(set(all_kernels()) - set(computed))


def write_record(path: Path) -> None:
    """Write the first test of each kernel."""
    from mindspeed_testing.npu.device import COMPUTED
    from mindspeed_testing.npu.kernels import all_kernels

    kept = {name: test for name, test in sorted(COMPUTED.items()) if name in all_kernels()}
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def read_record(path: Path) -> dict[str, str]:
    """Return the first test of each kernel, by operation."""
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found


def compare_record(path: Path) -> list[str]:
    """Return the kernels that a record lacks, one line each."""
    lacking = missing(read_record(path))
    return [f"{name} is not in {path}: write it with --write-contracts" for name in lacking]
