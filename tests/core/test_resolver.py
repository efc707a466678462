"""Plans: active features with order and reason, or every problem."""

import random
import subprocess
import sys
import time
from argparse import Namespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_core.feature import (
    Conflict,
    Fallback,
    Feature,
    Flag,
    Patch,
    Requirement,
    Scenario,
    Slot,
    StageSpecs,
    TakeOver,
    hookimpl,
)
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.resolver.resolve import resolve

VERSIONS = {"megatron-core": "0.16.1", "torch": "2.13.0+cpu", "torch_npu": "2.7.1"}


def feature(name, **attributes):
    values = {"name": name, "family": "demo", "summary": "shows", "flags": (Flag(f"--{name}"),), **attributes}
    return type(name.replace("-", "_"), (Feature,), values)


def plan(line, *declared, platform="cpu", **options):
    registry = Registry.of(declared)
    parsed = flag_set(registry, "").parse(line.split())
    if parsed.problems:
        raise PlanError(parsed.problems)
    return resolve(
        registry,
        parsed.args,
        provenance=parsed.provenance,
        platform=platform,
        host="",
        versions=VERSIONS,
        left_out=parsed.left_out,
        **options,
    )


def problems(line, *declared, **options):
    with pytest.raises(PlanError) as caught:
        plan(line, *declared, **options)
    return caught.value.problems


def only(line, *declared, **options):
    (problem,) = problems(line, *declared, **options)
    return problem


def test_nothing_asked_for_is_nothing_active():
    assert plan("", feature("a")).names == ()


def test_a_feature_is_active_because_of_its_flag():
    (active,) = plan("--a", feature("a")).features
    assert (active.name, active.why, active.dist) == ("a", "--a", "test")


def test_a_dependency_comes_first_and_ties_are_broken_by_family_and_name():
    a = feature("a", requires=(Requirement(feature="z"),))
    declared = (feature("y", family="b"), a, feature("z", family="c"), feature("x", family="b"))
    assert plan("--a --z --y --x", *declared).names == ("x", "y", "z", "a")


def test_extending_the_choices_of_a_flag_asks_for_the_feature_with_its_own_values_only():
    host = feature("host", flags=(Flag("--optimizer", type=str, default="adam", choices=("adam", "sgd")),))
    lion = feature("lion", flags=(Flag("--optimizer", type=str, choices=("lion",)),))
    assert "lion" not in plan("--optimizer sgd", host, lion)
    assert "lion" in plan("--optimizer lion", host, lion)


def test_after_orders_only_features_that_are_active():
    a, b = feature("a", after=("b", "absent")), feature("b")
    assert plan("--a --b", a, b).names == ("b", "a")
    assert plan("--a", a, b).names == ("a",)


def test_before_orders_only_features_that_are_active():
    b = feature("b", before=("a", "gone"))
    assert plan("--a --b", feature("a"), b).names == ("b", "a")
    assert plan("--b", feature("a"), b).names == ("b",)


@pytest.mark.parametrize("grid", [{"before": ("flash",)}, {"before": ("other",)}])
def test_a_feature_comes_before_what_it_requires_where_somebody_says_so(grid):
    grid = feature("grid", requires=(Requirement(feature="flash", implies=True),), **grid)
    flash, other = feature("flash"), feature("other", before=("flash",))
    assert plan("--grid --other", grid, flash, other).names == ("grid", "other", "flash")


def test_a_statement_over_a_feature_that_is_not_active_overrules_nothing():
    grid = feature("grid", requires=(Requirement(feature="flash"),), before=("other",))
    made = plan("--grid --flash", grid, feature("flash"), feature("other", before=("flash",)))
    assert made.names == ("flash", "grid")


def test_a_requirement_that_implies_switches_the_feature_on():
    a = feature("a", requires=(Requirement(feature="b", implies=True),))
    b = feature("b", requires=(Requirement(feature="c", implies=True),))
    active = plan("--a", a, b, feature("c")).features
    assert [(f.name, f.why) for f in active] == [("c", "implied by b"), ("b", "implied by a"), ("a", "--a")]


def test_a_requirement_that_needs_a_decision_is_a_problem_with_the_flag_to_add():
    problem = only("--a", feature("a", requires=(Requirement(feature="b", reason="why"),)), feature("b"))
    assert (problem.code, problem.feature, problem.flag) == ("E-REQUIRES", "a", "--a")
    assert problem.remedy == "add --b"
    assert "(why)" in problem.reason


def test_a_requirement_on_any_of_several_is_satisfied_by_one_and_orders_it_first():
    a = feature("a", requires=(Requirement(any_of=("x", "y")),))
    assert plan("--a --y", a, feature("x"), feature("y")).names == ("y", "a")
    problem = only("--a", a, feature("x"), feature("y"))
    assert (problem.code, problem.remedy) == ("E-REQUIRES", "add --x, or add --y")


@pytest.mark.parametrize(
    ("requirement", "good", "bad"),
    [
        (Requirement(flag="--depth"), "--depth 3", ""),
        (Requirement(flag="--depth", equals=3), "--depth 3", "--depth 4"),
        (Requirement(flag="--depth", one_of=(3, 5)), "--depth 5", "--depth 4"),
        (Requirement(flag="--no-bias"), "--no-bias", ""),
    ],
)
def test_a_requirement_on_a_flag_looks_at_its_value(requirement, good, bad):
    sizes = feature(
        "sizes", flags=(Flag("--sizes"), Flag("--depth", type=int), Flag("--no-bias", inverts="bias"))
    )
    a = feature("a", requires=(requirement,))
    assert "a" in plan(f"--a {good}", a, sizes)
    problem = only(f"--a {bad}", a, sizes)
    assert problem.code == "E-REQUIRES"
    assert requirement.flag in problem.remedy


@pytest.mark.parametrize(
    ("requirement", "remedy"),
    [
        (Requirement(flag="--size"), "set --size N"),
        (Requirement(flag="--size", equals=4), "set --size 4"),
        (Requirement(flag="--kind", one_of=("b", "c")), "set --kind b or --kind c"),
        (Requirement(flag="--kind"), "set --kind a or b or c"),
        (Requirement(flag="--on"), "add --on"),
        (Requirement(flag="--no-off", equals=False), "add --no-off"),
        (Requirement(flag="--elsewhere"), "set --elsewhere VALUE"),
        (Requirement(feature="measured"), "add --share 0.5"),
        (Requirement(feature="chosen"), "add --style own"),
        (Requirement(any_of=("measured", "plain")), "add --share 0.5, or add --plain"),
    ],
)
def test_the_remedy_of_a_requirement_is_what_to_type(requirement, remedy):
    flags = (
        Flag("--values"),
        Flag("--size", type=int),
        Flag("--kind", type=str, choices=("a", "b", "c")),
        Flag("--on"),
        Flag("--no-off", inverts="off"),
    )
    proof = Scenario("x", flags=("--plain", "--share", "0.5"))
    declared = (
        feature("values", flags=flags),
        feature("measured", flags=(Flag("--share", type=float),), verify=(proof,)),
        feature("chosen", flags=(Flag("--style", type=str, choices=("own",)),)),
        feature("plain"),
    )
    assert only("--a", feature("a", requires=(requirement,)), *declared).remedy == remedy


@pytest.mark.parametrize(
    ("conflict", "line", "remedy"),
    [
        (Conflict(flag="--on"), "--on", "drop --on"),
        (Conflict(flag="--kind", equals="a"), "--kind a", "set --kind b or c"),
        (Conflict(flag="--size", one_of=(3, 4)), "--size 3", "set --size 1"),
        (Conflict(flag="--name", equals="x"), "--name x", "drop --name"),
    ],
)
def test_the_remedy_of_a_conflict_is_what_to_type(conflict, line, remedy):
    flags = (
        Flag("--values"),
        Flag("--size", type=int, default=1),
        Flag("--kind", type=str, choices=("a", "b", "c")),
        Flag("--on"),
        Flag("--name", type=str),
    )
    declared = (feature("a", conflicts=(conflict,)), feature("values", flags=flags))
    assert only(f"--a {line}", *declared).remedy == f"drop --a, or {remedy}"


def test_a_missing_plugin_is_named_with_its_pip_line():
    problem = only("--a", feature("a", requires=(Requirement(feature="cp-ring"),)))
    assert (problem.code, problem.remedy) == ("E-MISSING-PLUGIN", "pip install mindspeed-cp")


def test_a_requirement_on_a_broken_feature_says_what_is_wrong_with_it():
    problem = only("--a", feature("a", requires=(Requirement(feature="b"),)), feature("b", level=7))
    assert problem.code == "E-BROKEN-PLUGIN"
    assert "level 7" in problem.reason


def test_a_feature_above_the_level_is_held_back_with_the_remedy():
    made = plan("--a --optimization-level 1", feature("a", level=2))
    (held,) = made.held_back
    assert made.names == ()
    assert (held.name, held.flag, held.remedy) == ("a", "--a", "--optimization-level 2")


def test_what_nobody_asked_for_is_not_listed_as_held_back():
    always = feature("a", enabled=classmethod(lambda cls, args: True))
    assert plan("--optimization-level 0", always).held_back == ()


def test_a_requirement_above_the_level_is_a_problem_of_its_own():
    a = feature("a", level=0, requires=(Requirement(feature="b", implies=True),))
    problem = only("--a --optimization-level 1", a, feature("b", level=2))
    assert problem.code == "E-REQUIRES-LEVEL"
    assert "--optimization-level 2" in problem.remedy


def test_a_feature_of_another_hosts_training_loop_is_a_problem_that_names_its_hosts():
    problem = only("--a", feature("a", hosts=("elsewhere",)))
    assert (problem.code, problem.flag) == ("E-HOST", "--a")
    assert "it works in: elsewhere" in problem.reason


def test_a_feature_that_does_not_run_on_the_platform_is_a_problem():
    problem = only("--a", feature("a", platforms=("npu",)))
    assert problem.code == "E-PLATFORM"
    assert "runs on: npu" in problem.reason


def test_a_fallback_takes_over_where_the_feature_does_not_run():
    a = feature("a", platforms=("npu",), fallback=Fallback("needs HCCL", feature="b"))
    made = plan("--a", a, feature("b"))
    assert [(f.name, f.why) for f in made.features] == [("b", "fallback of a")]
    assert made.held_back[0].reason == "needs HCCL"
    assert plan("--a", a, feature("b"), platform="npu").names == ("a",)


def test_a_fallback_without_a_feature_leaves_it_out():
    made = plan("--a", feature("a", platforms=("npu",), fallback=Fallback("not needed here")))
    assert (made.names, made.held_back[0].name) == ((), "a")


def in_inference(line, *classes):
    return plan(line, *classes, mode="inference")


def test_a_feature_of_another_mode_has_no_effect():
    (held,) = in_inference("--a", feature("a", modes=("train",))).held_back
    assert held.reason == "it has no effect in mode inference"


def test_a_fallback_takes_over_in_a_mode_that_is_not_the_features():
    instead = Fallback("one token cannot be shared", feature="b")
    a = feature("a", modes=("train",), mode_fallback=instead)
    made = in_inference("--a", a, feature("b"))
    assert [(f.name, f.why) for f in made.features] == [("b", "fallback of a")]
    (held,) = made.held_back
    assert held.reason == "not in mode inference: one token cannot be shared"
    assert (held.flag, held.remedy) == ("--a", "nothing; b takes over")
    assert plan("--a", a, feature("b")).names == ("a",)


def test_a_fallback_of_a_mode_without_a_feature_leaves_it_out_with_its_reason():
    a = feature("a", modes=("train",), mode_fallback=Fallback("one token cannot be shared"))
    (held,) = in_inference("--a", a).held_back
    assert (held.name, held.remedy) == ("a", "nothing; it is left out")


def test_a_feature_takes_over_what_it_does_as_well():
    def refuses(cls, args):
        return ["not beside b"]

    a = feature("a", slots=("norm",), validate=classmethod(refuses))
    b = feature("b", slots=("norm",), takes_over=(TakeOver("a", "b does it by blocks"),))
    asking = feature("asking", requires=(Requirement(feature="a", implies=True),))
    made = plan("--asking --b", a, b, asking)
    assert made.names == ("asking", "b")
    assert made.slots == {"norm": "b"}
    assert made.arguments["a"] is False
    (held,) = plan("--a --b", a, b).held_back
    assert (held.name, held.flag, held.reason) == ("a", "--a", "b does it by blocks")
    assert held.remedy == "nothing; b takes over"
    assert only("--a", a, b).reason == "not beside b"


def test_a_feature_that_has_nothing_to_do_is_held_back_with_its_reason():
    a = feature("a", idle=classmethod(lambda cls, args: "" if args.b else "there is no b"))
    b = feature("b", requires=(Requirement(feature="a", implies=True),))
    (held,) = plan("--a", a, b).held_back
    assert (held.name, held.flag, held.reason) == ("a", "--a", "there is no b")
    assert plan("--a --b", a, b).names == ("a", "b")


def test_a_feature_of_another_mode_is_held_back():
    made = plan("--a", feature("a", modes=("train",)), mode="inference")
    assert (made.names, made.held_back[0].flag) == ((), "--a")


@pytest.mark.parametrize(
    ("package", "platform", "found"),
    [
        ("megatron-core>=0.17", "cpu", "0.16.1"),
        ("torch_npu>=2.9; platform == 'npu'", "npu", "2.7.1"),
        ("no-such-thing>=1", "cpu", "not installed"),
        ("torch-npu>=2.9; platform in 'npu, cuda'", "cuda", "2.7.1"),
        ("torch>=3; platform != 'npu' and python_version >= '3'", "cpu", "2.13.0"),
        ("not a requirement", "cpu", "cannot be read"),
    ],
)
def test_a_package_that_does_not_fit_is_a_problem(package, platform, found):
    problem = only("--a", feature("a", packages=(package,)), platform=platform)
    assert problem.code == "E-PACKAGE"
    assert found in problem.reason


@pytest.mark.parametrize(
    "package",
    [
        "megatron-core>=0.15,<0.17",
        "torch_npu>=2.9; platform == 'npu'",
        "Torch.NPU>=2.6",
        "no-such-thing; python_version < '3'",
        "no-such-thing; platform == 'npu' or platform == 'cuda'",
    ],
)
def test_a_package_that_fits_or_does_not_apply_is_no_problem(package):
    assert "a" in plan("--a", feature("a", packages=(package,)))


def test_installed_versions_are_asked_of_the_environment_by_default():
    registry = Registry.of((feature("a", packages=("pluggy>=1", "no-such-dist-anywhere")),))
    with pytest.raises(PlanError) as caught:
        resolve(registry, Namespace(a=True), platform="cpu", host="")
    assert [p.reason for p in caught.value.problems] == [
        "needs no-such-dist-anywhere, which is not installed"
    ]


def test_two_features_on_one_slot_are_one_problem_naming_all():
    declared = [feature(name, slots=("norm",)) for name in ("a", "b", "c")]
    problem = only("--a --b --c", *declared)
    assert problem.code == "E-SLOT"
    assert "a, b and c" in problem.reason
    assert plan("--a", *declared).slots == {"norm": "a"}


def test_a_slot_that_only_groups_takes_several():
    group = Slot("reports", exclusive=False)
    made = plan("--a --b", group, feature("a", slots=("reports",)), feature("b", slots=("reports",)))
    assert made.names == ("a", "b")


@pytest.mark.parametrize(
    ("one", "other", "role"),
    [
        ({"replaces_roles": ("fc1",)}, {"replaces_roles": ("mlp.fc1",)}, "fc1"),
        ({"replaces_roles": ("final_layernorm",)}, {"slots": ("norm",)}, "final_layernorm"),
        ({"slots": ("norm",)}, {"replaces_roles": ("q_layernorm", "k_layernorm")}, "k_layernorm"),
    ],
)
def test_two_features_that_replace_the_same_modules_are_one_problem_naming_both(one, other, role):
    problem = only("--a --b", feature("a", **one), feature("b", **other))
    assert problem.code == "E-ROLE"
    assert problem.reason.startswith("a and b each replace the modules with the role ")
    assert role in problem.reason
    assert problem.remedy == "keep one of --a, --b"


def test_features_that_replace_other_modules_go_together():
    a, b = feature("a", replaces_roles=("mlp.fc1",)), feature("b", replaces_roles=("experts.fc1", "fc2"))
    assert plan("--a --b", a, b, feature("c", slots=("norm",))).names == ("a", "b")


def test_features_that_share_a_slot_are_not_reported_by_their_roles_too():
    both = (feature("a", slots=("norm",)), feature("b", slots=("norm",), replaces_roles=("q_layernorm",)))
    assert only("--a --b", *both).code == "E-SLOT"


@pytest.mark.parametrize("owner", ["a", "b"])
def test_a_conflict_is_symmetric_and_reported_once(owner):
    other = {"a": "b", "b": "a"}[owner]
    declared = (feature(owner, conflicts=(Conflict(feature=other, reason="both cut q"),)), feature(other))
    problem = only("--a --b", *declared)
    assert problem.code == "E-CONFLICT"
    assert "both cut q" in problem.reason
    assert "--a or --b" in problem.remedy


def test_a_conflict_with_a_value_of_a_flag():
    kind = feature("kind", flags=(Flag("--kind"), Flag("--norm-kind", type=str)))
    a = feature("a", conflicts=(Conflict(flag="--norm-kind", equals="layer"),))
    assert "a" in plan("--a --norm-kind rms", a, kind)
    assert only("--a --norm-kind layer", a, kind).code == "E-CONFLICT"


def test_one_offending_value_of_several_is_a_conflict_and_one_required_one_is_not_enough():
    kind = feature("kind", flags=(Flag("--kind"), Flag("--kinds", type=str, nargs="+")))
    a = feature("a", conflicts=(Conflict(flag="--kinds", one_of=("sinkhorn",)),))
    b = feature("b", requires=(Requirement(flag="--kinds", one_of=("x", "y")),))
    assert "a" in plan("--a --kinds aux none", a, kind)
    assert only("--a --kinds aux sinkhorn", a, kind).code == "E-CONFLICT"
    assert "b" in plan("--b --kinds x y", b, kind)
    assert only("--b --kinds x z", b, kind).code == "E-REQUIRES"


def test_a_conflict_with_a_switch_that_turns_off_counts_only_where_somebody_gave_it():
    kind = feature("kind", flags=(Flag("--kind"), Flag("--no-fusion", inverts="fusion")))
    a = feature("a", conflicts=(Conflict(flag="--no-fusion"),))
    assert only("--a --no-fusion", a, kind).code == "E-CONFLICT"
    registry = Registry.of((a, kind))
    parsed = flag_set(registry, "").parse(["--a"])
    # As a host does whose kernels are not installed.
    parsed.args.fusion = False
    assert "a" in resolve(
        registry, parsed.args, provenance=parsed.provenance, platform="cpu", host="", versions=VERSIONS
    )


def replacing(stage="train_step"):
    @hookimpl
    def implementation(self, session):
        return session

    return {stage: implementation}


def wrapping(stage="train_step"):
    @hookimpl(wrapper=True)
    def implementation(self, session):
        return (yield)

    return {stage: implementation}


def test_two_features_that_replace_one_stage_are_a_problem():
    problem = only("--a --b", feature("a", **replacing()), feature("b", **replacing()))
    assert problem.code == "E-STAGE"
    assert "train_step" in problem.reason


def test_any_number_of_features_may_wrap_a_stage_that_one_replaces():
    made = plan(
        "--a --b --c", feature("a", **replacing()), feature("b", **wrapping()), feature("c", **wrapping())
    )
    assert len(made.names) == 3


def test_a_default_that_asks_to_go_last_does_not_replace_a_stage():
    @hookimpl(trylast=True)
    def train_step(self, session):
        return session

    made = plan("--a --b", feature("a", train_step=train_step), feature("b", **replacing()))
    assert made.names == ("a", "b")


def test_a_stage_that_collects_results_may_be_implemented_by_many():
    specs = StageSpecs("nowhere.hooks", ("gather_things",), collecting=("gather_things",))
    declared = (specs, feature("a", **replacing("gather_things")), feature("b", **replacing("gather_things")))
    assert plan("--a --b", *declared).names == ("a", "b")
    core = (feature("a", **replacing("checkpoint_state")), feature("b", **replacing("checkpoint_state")))
    assert plan("--a --b", *core).names == ("a", "b")


def patched(name, kind="replace", versions=""):
    return feature(name, patches=(Patch("m:f", "m:g", "no other way", kind=kind, versions=versions),))


def test_two_features_that_replace_one_symbol_are_a_problem_and_wrapping_it_is_not():
    problem = only("--a --b", patched("a"), patched("b"))
    assert (problem.code, "m:f" in problem.reason) == ("E-PATCH", True)
    made = plan("--a --b", patched("a"), patched("b", kind="wrap"))
    assert [patch.owner for patch in made.patches] == ["a", "b"]


def test_a_patch_written_for_another_version_is_a_problem():
    problem = only("--a", patched("a", versions="megatron-core<0.16"))
    assert problem.code == "E-PATCH-VERSION"
    assert "0.16.1" in problem.reason


def test_a_features_own_check_reports_every_complaint():
    a = feature("a", validate=classmethod(lambda cls, args: ["one", "two"]))
    assert [(p.code, p.reason) for p in problems("--a", a)] == [("E-VALIDATE", "one"), ("E-VALIDATE", "two")]


def test_a_check_that_fails_is_a_problem_and_no_traceback():
    a = feature("a", validate=classmethod(lambda cls, args: 1 // 0))
    assert "ZeroDivisionError" in only("--a", a).reason


def failing(cls, args):
    raise KeyError("nothing")


@pytest.mark.parametrize("method", ["enabled", "presets"])
def test_a_feature_that_fails_unasked_is_left_out_and_named_with_its_package(method):
    a = feature("a", **{method: classmethod(failing)})
    made = plan("--b", a, feature("b"))
    assert made.names == ("b",)
    (held,) = made.held_back
    assert held.name == "a"
    assert f"its {method}() fails in test 0: KeyError: 'nothing'" in held.reason
    assert "pip install --upgrade test" in held.remedy


@pytest.mark.parametrize(("method", "code"), [("enabled", "E-ENABLED"), ("presets", "E-PRESET")])
def test_a_feature_that_fails_when_asked_for_is_a_problem_that_names_its_package(method, code):
    problem = only("--a", feature("a", **{method: classmethod(failing)}))
    assert (problem.code, problem.feature, problem.flag) == (code, "a", "--a")
    assert f"its {method}() fails in test 0" in problem.reason
    assert "drop --a" in problem.remedy


def test_a_feature_that_fails_is_asked_for_by_its_own_choice_of_a_flag_alone():
    kind = feature("kind", flags=(Flag("--kind", type=str, default="plain", choices=("plain", "fancy")),))
    a = feature(
        "a", flags=(Flag("--kind", type=str, choices=("own",)),), enabled=classmethod(failing), family="z"
    )
    assert plan("--kind fancy", kind, a).names == ("kind",)
    assert only("--kind own", kind, a).code == "E-ENABLED"


def test_a_preset_that_no_flag_defines_leaves_out_a_feature_that_nobody_asked_for():
    a = feature("a", presets=classmethod(lambda cls, args: {"nowhere": 1}))
    (held,) = plan("", a).held_back
    assert "it presets 'nowhere', which no flag defines" in held.reason


def test_a_feature_that_is_on_by_itself_and_cannot_check_is_left_out_with_who_needs_it():
    a = feature("a", flags=(), enabled=classmethod(lambda cls, args: True), validate=classmethod(failing))
    made = plan("--b", a, feature("b"))
    assert made.names == ("b",)
    assert [held.name for held in made.held_back] == ["a"]
    needs = feature(
        "c",
        flags=(),
        enabled=classmethod(lambda cls, args: True),
        requires=(Requirement(feature="d", implies=True),),
    )
    d = feature("d", validate=classmethod(failing))
    made = plan("--b", needs, d, feature("b"))
    assert made.names == ("b",)
    assert {held.name for held in made.held_back} == {"c", "d"}
    assert "its validate() fails in test 0" in only("--d", needs, d).reason


def noting(*sentences):
    return classmethod(lambda cls, args: [f"{sentence} {args.a}" for sentence in sentences])


def test_what_an_active_feature_notes_is_in_the_plan_and_not_in_its_digest():
    a = feature("a", flags=(Flag("--a", type=int),), notes=noting("heads", "idle"))
    made = plan("--a 3", a)
    assert [str(note) for note in made.notes] == ["a: heads 3", "a: idle 3"]
    assert made.digest == plan("--a 3", feature("a", flags=(Flag("--a", type=int),))).digest
    assert plan("", a).notes == ()


def test_a_note_that_cannot_be_computed_is_a_note_with_its_package():
    (note,) = plan("--a", feature("a", notes=classmethod(failing))).notes
    assert "its notes() fails in test 0: KeyError: 'nothing'" in str(note)


def test_a_given_flag_that_a_broken_feature_shares_is_noted():
    broken = feature("lost", flags=(Flag("--a"),), slots=("nowhere",))
    (note,) = plan("--a", feature("a"), broken).notes
    assert note.feature == "lost"
    assert "slot 'nowhere'" in str(note)
    assert plan("--b", feature("a"), feature("b"), broken).notes == ()


def test_the_plan_says_which_statement_orders_two_features():
    a, b = feature("a", after=("c",)), feature("b", before=("a",))
    made = plan("--a --b --c", a, b, feature("c"))
    assert made.stated_order == ("b comes before a (says b)", "c comes before a (says a)")


def test_all_problems_are_reported_at_once():
    declared = (
        feature("a", slots=("norm",), requires=(Requirement(feature="gone"),)),
        feature("b", slots=("mlp",)),
        feature("c", slots=("mlp",)),
        feature("d", platforms=("npu",)),
    )
    assert [p.code for p in problems("--a --b --c --d", *declared)] == [
        "E-PLATFORM",
        "E-MISSING-PLUGIN",
        "E-SLOT",
    ]


def test_a_feature_that_cannot_be_active_causes_no_further_problems():
    a = feature("a", slots=("norm",), requires=(Requirement(feature="gone"),))
    c = feature("c", requires=(Requirement(feature="a"),), conflicts=(Conflict(feature="b"),))
    assert only("--a --b --c", a, feature("b", slots=("norm",)), c).code == "E-MISSING-PLUGIN"


def test_a_cycle_through_alternatives_is_printed():
    a = feature("a", requires=(Requirement(any_of=("b", "x")),))
    problem = only("--a --b", a, feature("b", requires=(Requirement(any_of=("a", "y")),)))
    assert problem.code == "E-CYCLE"
    assert "a -> b -> a" in problem.reason
    assert problem.remedy.startswith("drop --a or --b")


def test_a_plan_holds_the_arguments_of_active_features_only():
    made = plan("--a --size 3", feature("a", flags=(Flag("--a"), Flag("--size", type=int))), feature("b"))
    assert made.arguments == {"a": True, "size": 3}


def test_the_digest_changes_with_a_value_and_not_with_a_value_of_one_rank():
    a = feature("a", flags=(Flag("--a"), Flag("--size", type=int), Flag("--cache", type=str, per_rank=True)))
    assert plan("--a --size 1", a).digest != plan("--a --size 2", a).digest
    assert plan("--a --cache /x", a).digest == plan("--a --cache /y", a).digest


def test_the_digest_is_the_same_in_every_process():
    code = (
        "from argparse import Namespace\n"
        "from mindspeed_core.feature import Feature, Flag\n"
        "from mindspeed_core.registry import Registry\n"
        "from mindspeed_core.resolver.resolve import resolve\n"
        "class A(Feature):\n"
        "    name, family, summary, flags = 'a', 'f', 's', (Flag('--a', type=str),)\n"
        "args = Namespace(a=frozenset(map(str, range(50))))\n"
        "print(resolve(Registry.of((A,)), args, platform='cpu', host='').digest)\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed},
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


@st.composite
def graphs(draw):
    """Random features without cycles, and which of them are asked for."""
    count = draw(st.integers(1, 12))
    names = [f"f{i}" for i in range(count)]
    shuffled = draw(st.permutations(names))
    declared = []
    for position, name in enumerate(shuffled):
        earlier = shuffled[:position]
        picks = st.lists(st.sampled_from(earlier), max_size=3, unique=True) if earlier else st.just([])
        requires = tuple(Requirement(feature=n, implies=draw(st.booleans())) for n in draw(picks))
        others = [n for n in names if n != name]
        conflicts = ()
        if others and draw(st.integers(0, 9)) == 0:
            conflicts = (Conflict(feature=draw(st.sampled_from(others))),)
        declared.append(
            feature(
                name,
                family=draw(st.sampled_from("xyz")),
                level=draw(st.sampled_from((0, 1, 2))),
                requires=requires,
                after=tuple(draw(picks)),
                conflicts=conflicts,
            )
        )
    asked = draw(st.lists(st.sampled_from(names), unique=True))
    return declared, asked, draw(st.integers(0, 2)), draw(st.randoms(use_true_random=False))


def outcome(declared, asked, level):
    args = Namespace(optimization_level=level, **dict.fromkeys(asked, True))
    try:
        return resolve(Registry.of(declared), args, platform="cpu", host="", versions={})
    except PlanError as error:
        return error.problems


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_every_plan_keeps_its_promises(graph):
    declared, asked, level, shuffler = graph
    made = outcome(declared, asked, level)
    again = outcome(declared, asked, level)
    mixed = list(declared)
    shuffler.shuffle(mixed)
    assert made == again == outcome(mixed, asked, level)
    if isinstance(made, tuple):
        assert made
        return
    position = {name: index for index, name in enumerate(made.names)}
    by_name = {cls.name: cls for cls in declared}
    for name in made.names:
        cls = by_name[name]
        assert cls.level <= level
        assert all(position[r.feature] < position[name] for r in cls.requires)
        assert all(position[other] < position[name] for other in cls.after if other in position)
        assert not any(conflict.feature in position for conflict in cls.conflicts)


@st.composite
def orders(draw):
    """Features, all of them asked for, whose requirements and statements follow two orders."""
    names = [f"f{i}" for i in range(draw(st.integers(2, 7)))]

    def pairs(order):
        every = [(first, second) for i, first in enumerate(order) for second in order[i + 1 :]]
        return draw(st.lists(st.sampled_from(every), unique=True, max_size=8))

    needed = pairs(draw(st.permutations(names)))
    stated = [(*pair, draw(st.booleans())) for pair in pairs(draw(st.permutations(names)))]
    declared = [
        feature(
            name,
            requires=tuple(Requirement(feature=first) for first, second in needed if second == name),
            before=tuple(second for first, second, by_first in stated if by_first and first == name),
            after=tuple(first for first, second, by_first in stated if not by_first and second == name),
        )
        for name in names
    ]
    return declared, needed, [(first, second) for first, second, _ in stated]


def closure(pairs):
    """Every pair that follows from others."""
    found = set(pairs)
    while more := {(a, d) for a, b in found for c, d in found if b == c} - found:
        found |= more
    return found


@settings(max_examples=200, deadline=None)
@given(orders())
def test_what_is_stated_holds_and_overrules_what_requirements_say(features):
    declared, needed, stated = features
    registry = Registry.of(declared)
    said = closure(stated)
    wanted = closure([*stated, *((a, b) for a, b in needed if (b, a) not in said)])
    if any(a == b for a, b in wanted):
        assert registry.broken
        return
    args = Namespace(**{cls.name: True for cls in declared})
    names = resolve(registry, args, platform="cpu", host="", versions={}).names
    assert len(names) == len(declared)
    assert all(names.index(a) < names.index(b) for a, b in wanted)


def crowd(count, rng):
    names = [f"f{i}" for i in range(count)]
    declared = []
    for index, name in enumerate(names):
        earlier = names[max(0, index - 20) : index]
        requires = tuple(Requirement(feature=n) for n in rng.sample(earlier, min(2, len(earlier))))
        patches = (Patch(f"m:{name}", "m:g", "no other way", versions="megatron-core>=0.15"),)
        flags = (Flag(f"--{name}"), Flag(f"--{name}-size", type=int))
        declared.append(feature(name, requires=requires, patches=patches, flags=flags))
    return declared, Namespace(**dict.fromkeys(names, True))


@pytest.mark.parametrize(("count", "limit"), [(500, 0.05), (60, 0.002)])
def test_resolving_is_fast_enough_for_a_search(count, limit):
    declared, args = crowd(count, random.Random(0))
    registry = Registry.of(declared)
    resolve(registry, args, platform="cpu", host="", versions=VERSIONS)
    best = 1e9
    for _ in range(5):
        begin = time.process_time()
        resolve(registry, args, platform="cpu", host="")
        best = min(best, time.process_time() - begin)
    assert best < limit
