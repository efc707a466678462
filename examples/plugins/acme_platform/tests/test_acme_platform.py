"""A model trains on the platform as on CPU, and nothing mistakes the stand-in for a device."""

import pytest

from acme_platform.platform import AcmePlatform
from mindspeed_core.errors import UserError
from mindspeed_core.platforms.selection import choose_platform
from mindspeed_core.registry import Registry
from mindspeed_core.testing.contract import contract_checks


def steps(platform):
    """The losses of two steps, and what the platform says about itself."""
    from mindspeed_core import activate
    from mindspeed_core.hosts.standalone import loop
    from mindspeed_core.testing.model_flags import training_flags

    with activate(training_flags([], 2), host="standalone", platform=platform) as session:
        run = loop.setup(session)
        losses = [session.call("train_step", run=run).losses["lm loss"] for _ in range(2)]
        device = session.platform
        start, end = device.event(enable_timing=True), device.event(enable_timing=True)
        start.record()
        end.record()
        facts = {
            "memory": device.memory_allocated(),
            "peak": device.peak_memory().bytes,
            "total": device.total_memory(),
            "milliseconds": start.elapsed_time(end),
            "pinned": device.pinned_empty((2, 3), run.config.params_dtype).shape,
            "random": device.rng_state().dtype,
        }
        with device.use_stream(device.stream()):
            device.synchronize()
        loop.teardown(session)
    return losses, facts


def both():
    return steps("cpu"), steps("acme")


@pytest.fixture(scope="module")
def trained(mindspeed_world):
    return mindspeed_world(both, 1)[0]


def test_it_trains_bit_for_bit_as_the_cpu_does(trained):
    (on_cpu, _), (on_acme, _) = trained

    assert on_acme == on_cpu


def test_its_figures_say_where_they_come_from(trained):
    _, (_, facts) = trained

    assert facts["memory"].source == "process RSS, in place of a device's allocator"
    assert 0 < facts["memory"].bytes <= facts["total"]
    assert facts["peak"] >= facts["memory"].bytes * 0.9
    assert facts["milliseconds"] >= 0.0


def test_auto_never_takes_the_stand_in():
    assert choose_platform("auto", Registry.discover())[0] != "acme"


def test_asked_for_it_says_that_it_stands_in():
    assert "stands in" in choose_platform("acme", Registry.discover())[1]


def test_a_process_without_a_device_is_told_which_variable_limits_them(monkeypatch):
    monkeypatch.setenv("ACME_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match=r"local rank 2 has no device.*ACME_VISIBLE_DEVICES"):
        AcmePlatform().set_device(2)


@pytest.mark.parametrize("check", contract_checks("acme-platform", platform="acme"), ids=str)
def test_the_contract_is_kept(check):
    check()
