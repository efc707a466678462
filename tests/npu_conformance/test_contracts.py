"""Contracts of kernels: each names published sources and has a test that computed with it."""

from __future__ import annotations

import json
from pathlib import Path

from mindspeed_testing.npu import contracts
from mindspeed_testing.npu.kernels import all_kernels

RECORD = Path(__file__).with_name("contracts.json")


def test_every_contract_has_a_source_at_a_commit_with_a_day():
    lacking = [
        kernel.operation
        for kernel in all_kernels().values()
        if not kernel.sources or not all(s.path and s.commit and s.read for s in kernel.sources)
    ]
    assert lacking == []


def test_every_contract_has_a_test_that_exists():
    recorded = contracts.read_record(RECORD)
    assert contracts.compare_record(RECORD) == []
    root = RECORD.parents[2]
    for test in recorded.values():
        path, _, function = test.partition("::")
        assert f"def {function}(" in (root / path).read_text(encoding="utf-8"), test


def test_a_contract_that_the_record_lacks_is_named(tmp_path):
    recorded = dict(contracts.read_record(RECORD))
    recorded.pop("npu::npu_swiglu")
    path = tmp_path / "contracts.json"
    path.write_text(json.dumps(recorded))
    (line,) = contracts.compare_record(path)
    assert "npu::npu_swiglu is not in" in line
