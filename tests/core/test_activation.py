"""From flags in any form to a session, without a side effect on the program around it."""

import sys
from argparse import Namespace
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_core.activation import activate, plan_for, prepare
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_core.platforms.platform import Availability, Platform
from mindspeed_core.registry import Registry, RegistryError
from mindspeed_core.resolver.plan import PlanError


class Ring(Feature):
    name, family, summary = "ring", "demo", "a demonstration"
    flags = (Flag("--ring"), Flag("--ring-size", type=int, default=2))
    platforms = ("bare",)


class NpuOnly(Feature):
    name, family, summary, platforms = "npu-only", "demo", "a demonstration", ("npu",)
    flags = (Flag("--npu-only"),)


def no_flags():
    return ()


class Bare(Platform):
    """A platform that changes nothing, so that opening a session imports no megatron."""

    name = "bare"

    @classmethod
    def probe(cls):
        return Availability(True, "it needs nothing")


HOST = HostDeclaration("empty", "a host without stages", flags=f"{__name__}:no_flags", stages=())
REGISTRY = Registry.of((Ring, NpuOnly, HOST, Bare))
HERE = {"registry": REGISTRY, "host": "empty", "platform": "bare"}


@pytest.mark.parametrize(
    "flags",
    [
        ["--ring", "--ring-size", "4"],
        {"ring": True, "ring_size": 4},
        {"--ring": True, "--ring-size": "4"},
        Namespace(ring=True, ring_size=4, somebody_elses=object()),
    ],
)
def test_every_form_of_flags_gives_the_same_session(flags):
    session = prepare(flags, **HERE)
    assert session.plan.names == ("ring",)
    assert (session.args.ring_size, session.args.platform) == (4, "bare")
    assert session.provenance["ring_size"] == "flag --ring-size"
    assert not session.is_open


def test_mistakes_of_the_command_line_and_of_the_plan_are_reported_together():
    with pytest.raises(PlanError) as caught:
        prepare(["--rign", "--ring-size", "x", "--npu-only"], **HERE)
    assert [p.code for p in caught.value.problems] == ["E-UNKNOWN-FLAG", "E-FLAG-VALUE", "E-PLATFORM"]


def test_an_unknown_key_of_a_dictionary_is_an_error():
    with pytest.raises(PlanError, match="--rign"):
        prepare({"rign": True}, **HERE)


def test_one_string_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"shlex\.split"):
        prepare("--ring", **HERE)


def test_the_platform_of_the_flags_is_used_where_the_caller_names_none():
    session = prepare(["--platform", "bare"], registry=REGISTRY, host="empty")
    assert session.platform.name == "bare"


def test_a_platform_that_is_not_available_is_a_problem_of_its_flag():
    with pytest.raises(PlanError) as caught:
        prepare(["--platform", "npu"], registry=REGISTRY, host="empty")
    (problem,) = caught.value.problems
    assert (problem.code, problem.flag) == ("E-PLATFORM", "--platform")


def test_an_unknown_host_is_refused():
    with pytest.raises(RegistryError, match="nowhere"):
        prepare([], registry=REGISTRY, host="nowhere", platform="cpu")


def test_the_programs_own_command_line_is_never_read(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", "--not-ours", "--ring"])
    assert prepare([], **HERE).plan.names == ()


def test_a_session_of_mode_inference_says_so():
    assert prepare([], mode="inference", **HERE).mode == "inference"


def test_activate_opens_the_session_with_further_plugins_and_prints_nothing(capfd):
    class Probe:
        @hookimpl(wrapper=True)
        def should_stop(self, run):
            yield
            return f"asked {run}"

    with activate(["--ring"], extra_plugins=(Probe(),), **HERE) as session:
        assert session.is_open
        assert session.call("should_stop", run="once") == "asked once"
    assert not session.is_open
    assert capfd.readouterr() == ("", "")


TOKEN = st.one_of(
    st.sampled_from(
        ["--ring", "--ring-size", "--npu-only", "--optimization-level", "--platform", "--ring-size=3"]
    ),
    st.sampled_from(["0", "1", "2", "9", "bare", "cpu", "nan", "", "🦆", "x" * 5000, "9" * 5000, "-", "--"]),
    st.text(max_size=8),
)


@settings(max_examples=1000, deadline=None)
@given(st.lists(TOKEN, max_size=6))
def test_a_command_line_gives_a_plan_or_a_plan_error(tokens):
    with suppress(PlanError):
        plan, _ = plan_for(tokens, **HERE)
        assert len(plan.digest) == 64
