"""A platform that nobody's features know runs those of the platform that it says it is like."""

from __future__ import annotations

import pytest

from mindspeed_core.activation import plan_for
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.feature import Feature, Flag
from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_core.platforms.platform import Availability
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError


class Lookalike(CpuPlatform):
    name = "lookalike"
    like = "npu"

    @classmethod
    def probe(cls):
        return Availability(True, "for the test")


class Stranger(Lookalike):
    name = "stranger"
    like = ""


class ForNpu(Feature):
    name = "for-npu"
    family = "demo"
    summary = "lists one platform"
    flags = (Flag("--for-npu"),)
    platforms = ("npu",)
    packages = ("no-such-driver; platform == 'npu'",)


class ForNpuWithoutDriver(ForNpu):
    name = "for-npu-without-driver"
    flags = (Flag("--for-npu-without-driver"),)
    packages = ()


HOST = HostDeclaration("bare", "no stages", "", ())


def plan(flag, platform):
    registry = Registry.of([HOST, Lookalike, Stranger, ForNpu, ForNpuWithoutDriver])
    return plan_for([flag], host="bare", platform=platform, registry=registry)[0]


def test_features_of_the_platform_it_is_like_run_there():
    made = plan("--for-npu-without-driver", "lookalike")

    assert (made.names, made.platform) == (("for-npu-without-driver",), "lookalike")


def test_so_do_their_requirements():
    with pytest.raises(PlanError, match="no-such-driver"):
        plan("--for-npu", "lookalike")


def test_a_platform_that_is_like_none_runs_only_features_that_name_it():
    with pytest.raises(PlanError, match="does not run on platform stranger"):
        plan("--for-npu-without-driver", "stranger")
