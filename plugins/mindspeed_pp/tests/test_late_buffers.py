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

SWAPS = "mindspeed_pp.swaps"
FAULTS = {
    PlantedFault(SWAPS, "self.out.wait_event(read)", "pass"): "written without a wait",
    PlantedFault(
        SWAPS, "self._copies.platform.current_stream().wait_event(self._event)", "pass"
    ): "read without a wait",
    PlantedFault(SWAPS, "copies.back.wait_stream(copies.out)", "pass"): "read without a wait",
    PlantedFault(
        SWAPS, "platform.current_stream().wait_event(copies.out.record_event())", "pass"
    ): "freed while in use",
}
"""Waits, with the rule that is broken without each."""


def taken_again(fault=None):
    """Let a tensor leave into the buffer from which another one comes back, and one come on another stream.

    Returns:
        The findings, and the mean of each tensor that came back.
    """
    with nullcontext() if fault is None else planted(fault):
        session = prepare(training_flags((), 1), host=DEFAULT_HOST, platform="lagging")
        try:
            with session:
                copies = HostCopies(session.platform)
                first, second = (Kept(copies, torch.full((64, 64), float(n))) for n in (1, 2))
                first.leave()
                first.come()
                second.leave()
                values = [float(kept.tensor().mean()) for kept in (first, second)]
                third = Kept(copies, torch.full((32, 64), 3.0))
                third.leave()
                with session.platform.use_stream(session.platform.stream()):
                    values.append(float(third.tensor().mean()))
        except LaggingDeviceError as error:
            return str(error), []
    return "", values


def test_a_buffer_is_taken_when_its_last_copy_is_done():
    assert run_world(taken_again, 1) == [("", [1.0, 2.0, 3.0])]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.old)
def test_a_wait_that_is_missing_is_named(fault):
    ((text, _),) = run_world(taken_again, 1, fault)

    assert FAULTS[fault] in text
    assert "swaps.py" in text
