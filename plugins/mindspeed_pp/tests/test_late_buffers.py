"""Buffers on the host that micro-batches share, on a device whose copies are late."""

from contextlib import nullcontext

import pytest
import torch

from mindspeed_core.activation import prepare
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_pp.swaps import HostCopies, Kept
from mindspeed_testing import run_world
from mindspeed_testing.lagging.findings import LaggingDeviceError
from mindspeed_testing.lagging.planting import PlantedFault, planted
from mindspeed_testing.model_flags import training_flags

FAULTS = {
    "written without a wait": "self.out.wait_event(read)",
    "read without a wait": "self._copies.platform.current_stream().wait_event(self._event)",
    "freed while in use": "platform.current_stream().wait_event(copies.out.record_event())",
}
"""Waits, each by the rule that is broken without it."""


def taken_again(fault=None):
    """Let a tensor leave into the buffer from which another one comes back; return findings and values."""
    with nullcontext() if fault is None else planted(fault):
        session = prepare(training_flags((), 1), host=DEFAULT_HOST, platform="lagging")
        try:
            with session:
                copies = HostCopies(session.platform)
                first, second = (Kept(copies, torch.full((64, 64), float(n))) for n in (1, 2))
                first.leave()
                first.come()
                second.leave()
                values = [float(kept.tensor().sum()) / 64**2 for kept in (first, second)]
        except LaggingDeviceError as error:
            return str(error), []
    return "", values


def test_a_buffer_is_taken_when_its_last_copy_is_done():
    assert run_world(taken_again, 1) == [("", [1.0, 2.0])]


@pytest.mark.parametrize("rule", FAULTS)
def test_a_wait_that_is_missing_is_named(rule):
    ((text, _),) = run_world(taken_again, 1, PlantedFault("mindspeed_pp.swaps", FAULTS[rule], "pass"))

    assert rule in text
    assert "swaps.py" in text
