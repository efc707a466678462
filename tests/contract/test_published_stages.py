"""Stages that a plugin publishes and that cannot be loaded harm only those who need them."""

from __future__ import annotations

import pytest

from mindspeed_core.activation import prepare
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.errors import SessionError
from mindspeed_core.feature import Feature, Flag, StageSpecs, hookimpl
from mindspeed_core.registry import Registry

HOST = HostDeclaration("bare", "no stages", "", ())
LOST = StageSpecs("no_such_package.stages", ("lost_stage",))


class Bystander(Feature):
    name = "bystander"
    family = "demo"
    summary = "knows nothing of the stage"
    flags = (Flag("--bystander"),)


class Implementer(Feature):
    name = "implementer"
    family = "demo"
    summary = "implements the stage"
    flags = (Flag("--implementer"),)

    @hookimpl
    def lost_stage(self):
        return 1


def session(flag):
    registry = Registry.of([HOST, LOST, Bystander, Implementer])
    return prepare([flag], host="bare", platform="cpu", registry=registry)


def test_a_session_without_them_opens():
    with session("--bystander") as opened:
        assert opened.plan.names == ("bystander",)


def test_a_feature_that_implements_one_is_named_with_the_reason():
    with pytest.raises(SessionError, match=r"implementer: .*no_such_package\.stages.*ModuleNotFoundError"):
        session("--implementer").open()
