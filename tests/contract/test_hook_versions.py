"""Plugins of other versions of the hook interface: older minor versions work, newer ones are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindspeed_core.activation import plan_for
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.discovery.stages import core_stages
from mindspeed_core.feature import DeclarationError, Feature, Flag, HookApi, hookimpl
from mindspeed_core.hooks.versions import API_VERSION, parsed, refusal
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError

HOST = HostDeclaration("bare", "stages without a training", "", ())


class Patient(Feature):
    name = "patient"
    family = "demo"
    summary = "stops later"
    flags = (Flag("--patient"),)

    @hookimpl(wrapper=True)
    def should_stop(self, run):
        return (yield)


class Sound(Patient):
    name = "sound"
    flags = (Flag("--sound"),)


def test_a_plugin_for_a_newer_interface_is_one_clear_error():
    registry = Registry.of_distributions({"acme": ("7", [HookApi("1.99"), Patient]), "good": ("1", [Sound])})
    (record,) = registry.broken

    assert list(registry.features) == ["sound"]
    assert record.error == (f"it was written for hook interface 1.99, this mindspeed-core has {API_VERSION}")
    assert "pip install --upgrade mindspeed-core" in record.remedy


def test_asking_for_a_feature_of_a_plugin_that_is_too_new_says_why():
    registry = Registry.of_distributions({"host": ("1", [HOST]), "acme": ("7", [HookApi("1.99"), Patient])})
    with pytest.raises(PlanError, match=r"written for hook interface 1\.99") as caught:
        plan_for(["--patient"], host="bare", platform="cpu", registry=registry)

    assert len(caught.value.problems) == 1


def test_a_plugin_for_an_older_major_version_asks_for_a_newer_plugin():
    why, remedy = refusal("1.4", present="2.0")

    assert "written for hook interface 1.4, this mindspeed-core has 2.0" in why
    assert "newer version of the plugin" in remedy


@pytest.mark.parametrize("stated", ["1.0", "1.3"])
def test_an_older_minor_version_is_welcome(stated):
    assert refusal(stated, present="1.3") is None


@pytest.mark.parametrize("text", ["", "1", "1.x", "v1.0", "1.0.0"])
def test_something_that_is_no_version_breaks_the_plugin_with_the_right_form(text):
    with pytest.raises(DeclarationError, match=r"MAJOR\.MINOR"):
        parsed(text)
    assert "MAJOR.MINOR" in Registry.of([HookApi(text), Patient]).broken[0].error


def test_the_version_of_a_plugin_that_states_none_is_worked_out(monkeypatch):
    later = replace(core_stages()["should_stop"], since="1.2", added={"run": "1.4"})
    monkeypatch.setitem(core_stages(), "should_stop", later)

    assert Registry.of([Patient]).features["patient"].hook_api == "1.4"
    assert Registry.of([HookApi("1.0"), Patient]).features["patient"].hook_api == "1.0"


def test_a_missing_name_of_the_core_suggests_a_newer_core():
    def declarations():
        raise ImportError("cannot import name 'Novelty'", name="mindspeed_core.feature")
        yield

    assert "pip install --upgrade mindspeed-core" in Registry.of(declarations()).broken[0].remedy
