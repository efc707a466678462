"""Plugins of other versions of the hook interface: older ones work and are told, newer ones are refused."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from mindspeed_core.activation import plan_for, prepare
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.discovery.stages import core_stages
from mindspeed_core.feature import DeclarationError, Feature, Flag, HookApi, hookimpl
from mindspeed_core.hooks.versions import API_VERSION, Change, HookDeprecationWarning, parsed, refusal
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError

HOST = HostDeclaration("bare", "stages without a training", "", ())


class Defaults:
    """Stands for the host's implementations."""

    @hookimpl(trylast=True)
    def should_stop(self):
        return "default"


class OldName(Feature):
    """Wraps a stage under its former name, and asks for an argument by its former name."""

    name = "old-name"
    family = "demo"
    summary = "uses former names"
    flags = (Flag("--old-name"),)

    @hookimpl(wrapper=True)
    def must_stop(self, session, the_run):
        result = yield
        return f"{result}, {the_run}, {type(session).__name__}"


class OldReplacement(Feature):
    name = "old-replacement"
    family = "demo"
    summary = "replaces a stage, asking for an argument by its former name"
    flags = (Flag("--old-replacement"),)

    @hookimpl
    def should_stop(self, the_run):
        return f"replaced {the_run}"


class Going(Feature):
    name = "going"
    family = "demo"
    summary = "uses what goes"
    flags = (Flag("--going"),)

    @hookimpl(wrapper=True)
    def should_stop(self, run):
        return (yield)


@pytest.fixture
def changed(monkeypatch):
    """Give a stage of the core changes, as a later minor version would."""

    def change(name, *changes, **facts):
        monkeypatch.setitem(core_stages(), name, replace(core_stages()[name], changes=changes, **facts))

    return change


@pytest.fixture
def renamed(changed):
    changed(
        "should_stop",
        Change("1.0", was="must_stop"),
        Change("1.0", argument="run", was="the_run"),
        since="1.0",
    )


def answer(feature):
    """What the stage returns in a session with the feature, and the warnings of opening it."""
    registry = Registry.of([HOST, feature])
    assert registry.broken == ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HookDeprecationWarning)
        session = prepare(
            [feature.flags[0].name],
            host="bare",
            platform="cpu",
            registry=registry,
            extra_plugins=[Defaults()],
        )
        with session:
            result = session.call("should_stop", run="the run")
    return result, [str(w.message) for w in caught if w.category is HookDeprecationWarning]


def test_a_wrapper_of_former_names_works_and_is_told_each_change_once(renamed):
    result, told = answer(OldName)

    assert result == "default, the run, Session"
    assert len(told) == 2
    assert "old-name (test 0): stage 'should_stop' was called 'must_stop' before version 1.0" in told[0]
    assert "argument 'run' of stage 'should_stop' was called 'the_run'" in told[1]
    assert all("works until version 2.0" in sentence for sentence in told)


def test_a_replacement_that_asks_for_a_former_argument_works(renamed):
    result, told = answer(OldReplacement)

    assert result == "replaced the run"
    assert len(told) == 1


def test_what_goes_keeps_working_and_says_what_to_use_instead(changed):
    changed("should_stop", Change("1.0", instead="wrap train_step"))
    result, told = answer(Going)

    assert result == "default"
    assert told == [
        "going (test 0): stage 'should_stop' goes with version 2.0 of the hook interface: wrap train_step"
    ]


def test_an_argument_that_goes_is_told_only_to_those_who_ask_for_it(changed):
    changed("should_stop", Change("1.0", argument="session", instead="use run.session"))

    assert Registry.of([Going]).features["going"].notices == ()


def test_a_feature_of_the_present_names_is_handed_out_as_it_is():
    assert Registry.of([Going]).features["going"].cls is Going
    assert answer(Going) == ("default", [])


def test_a_former_name_is_unknown_without_a_change():
    assert "stage 'must_stop' does not exist" in Registry.of([OldName]).broken[0].error


def test_a_plugin_for_a_newer_interface_is_one_clear_error():
    registry = Registry.of_distributions({"acme": ("7", [HookApi("1.99"), Going]), "good": ("1", [OldGood])})
    (record,) = registry.broken

    assert list(registry.features) == ["old-good"]
    assert record.error == (f"it was written for hook interface 1.99, this mindspeed-core has {API_VERSION}")
    assert "pip install --upgrade mindspeed-core" in record.remedy


class OldGood(Going):
    name = "old-good"
    flags = (Flag("--old-good"),)


def test_asking_for_a_feature_of_a_plugin_that_is_too_new_says_why():
    registry = Registry.of_distributions({"host": ("1", [HOST]), "acme": ("7", [HookApi("1.99"), Going])})
    with pytest.raises(PlanError, match=r"written for hook interface 1\.99") as caught:
        plan_for(["--going"], host="bare", platform="cpu", registry=registry)

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
    assert "MAJOR.MINOR" in Registry.of([HookApi(text), Going]).broken[0].error


def test_the_version_of_a_plugin_that_states_none_is_worked_out(changed):
    changed("should_stop", since="1.2", added={"run": "1.4"})

    assert Registry.of([Going]).features["going"].hook_api == "1.4"
    assert Registry.of([HookApi("1.0"), Going]).features["going"].hook_api == "1.0"


def test_a_change_says_either_a_former_name_or_what_to_use_instead():
    with pytest.raises(DeclarationError, match="exactly one"):
        Change("1.1")


def test_a_missing_name_of_the_core_suggests_a_newer_core():
    def declarations():
        raise ImportError("cannot import name 'Novelty'", name="mindspeed_core.feature")
        yield

    assert "pip install --upgrade mindspeed-core" in Registry.of(declarations()).broken[0].remedy
