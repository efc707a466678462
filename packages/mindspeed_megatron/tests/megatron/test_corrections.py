"""Corrections of megatron-core end where it was mended: a recorded source is faulty in their range alone."""

from __future__ import annotations

from importlib import import_module

import pytest
from packaging.specifiers import SpecifierSet

from mindspeed_megatron import corrections
from mindspeed_megatron.corrections import CORRECTIONS, holds
from mindspeed_megatron.touch_points.record import index, known_version

LOOK = (
    "{name}: megatron-core {version} has another source of {function} than those that were read: where the "
    "fault is mended end the range of the correction, otherwise add the digest {digest}"
)


@pytest.mark.parametrize("version", index())
@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_known_version_has_the_fault_in_the_range_alone(name, version):
    one = CORRECTIONS[name]
    symbol = known_version(version).symbols.get(one.function.replace(":", "."))
    faulty = symbol is not None and symbol.digest in one.digests
    facts = {"name": name, "version": version, "function": one.function}

    assert faulty is SpecifierSet(one.versions).contains(version), LOOK.format(
        **facts, digest=symbol.digest if symbol else "none"
    )


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_module_that_corrects_exists(name):
    assert import_module(CORRECTIONS[name].module).__doc__


@pytest.mark.parametrize(("version", "holding"), [("0.16.1", True), ("0.17.0", False), ("0.16.9rc1", True)])
def test_a_correction_holds_in_its_range(version, holding, monkeypatch):
    monkeypatch.setattr(corrections, "installed_version", lambda name: version)
    holds.cache_clear()
    try:
        assert holds("residual-dtype") is holding
    finally:
        holds.cache_clear()
