"""The stand-in libraries do not lie: no device unless one is announced, and never memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from mindspeed_megatron.fake.answers import UnknownNumber
from mindspeed_testing.npu import fake_npu, value_device
from mindspeed_testing.npu.stubs import DEVICES

HONEST = """
import json, os, sys
import torch, torch_npu
try:
    torch.empty(4, device="npu")
    answer = "allocated"
except RuntimeError as error:
    answer = str(error)
facts = {"available": torch.npu.is_available(), "count": torch.npu.device_count(), "allocation": answer}
print(json.dumps(facts))
sys.stdout.flush()
os._exit(0)
"""


def facts_without(*variables):
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    done = subprocess.run(
        [sys.executable, "-c", HONEST],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_without_announcement_there_is_no_device_and_no_memory():
    facts = facts_without(DEVICES)
    assert (facts["available"], facts["count"]) == (False, 0)
    assert "507899" in facts["allocation"]


def test_a_device_that_is_only_announced_has_no_memory():
    facts = facts_without()
    assert (facts["available"], facts["count"]) == (True, 1)
    assert "507899" in facts["allocation"]


def test_a_copy_to_the_device_is_refused():
    with pytest.raises(RuntimeError, match="507899"):
        torch.ones(4).to("npu")


def test_a_value_device_has_memory_while_it_lasts():
    with value_device():
        assert torch.ones(4).to("npu").cpu().tolist() == [1, 1, 1, 1]
    with pytest.raises(RuntimeError, match="507899"):
        torch.ones(4).to("npu")


def test_numbers_read_from_the_fake_device_are_fixed_and_integers_refused():
    with fake_npu() as npu:
        assert npu.tensor(1, dtype=torch.float32).item() == 1.0
        assert npu.tensor(1, dtype=torch.bool).item() is False
        with pytest.raises(UnknownNumber, match=r"npu_stand_ins\.py:\d+ .* reads an integer"):
            npu.tensor(1, dtype=torch.int64).item()


def test_constants_become_tensors_of_the_device_without_memory():
    with fake_npu():
        assert torch.tensor([1.0, 2.0], device="npu").device.type == "npu"


def test_a_module_of_fake_parameters_moves():
    with fake_npu():
        module = torch.nn.Linear(4, 3, device="npu", dtype=torch.bfloat16)
        assert module.to(torch.device("npu", 0)).weight.device.type == "npu"
        assert module(torch.empty(2, 4, device="npu", dtype=torch.bfloat16)).shape == (2, 3)
