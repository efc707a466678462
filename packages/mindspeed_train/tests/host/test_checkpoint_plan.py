"""Resuming with other features says what changed, and stops where the checkpoint could not be right."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindspeed_megatron import plan_resume as plans
from mindspeed_train.checkpoint import model_arguments as models


def plan(*names, version="1.0", slots=None):
    features = [{"name": n, "version": version, "dist": f"dist-{n}", "why": f"--{n}"} for n in names]
    return {"features": features, "slots": slots or {}}


def compare(saved, current, **affects):
    return plans.compare_plans(saved, current, affects)


def test_equal_plans_are_silent():
    assert compare(plan("a", "b"), plan("a", "b"), a=True, b=True) == plans.PlanChange()


def test_another_order_is_harmless():
    change = compare(plan("a", "b"), plan("b", "a"), a=True, b=True)
    assert change.breaking == ()
    assert "order" in change.harmless[0]


def test_another_version_is_harmless():
    change = compare(plan("a"), plan("a", version="2.0"), a=True)
    assert change.breaking == ()
    assert change.harmless == ("a: version 1.0 then, 2.0 now",)


def test_a_removed_feature_that_affects_checkpoints_breaks_and_names_its_flag():
    change = compare(plan("a"), plan(), a=True)
    assert "a was active" in change.breaking[0]
    assert "add --a" in change.breaking[0]


def test_an_added_feature_that_affects_checkpoints_breaks():
    assert "drop --a" in compare(plan(), plan("a"), a=True).breaking[0]


@pytest.mark.parametrize(("then", "today"), [("slow", "fast"), ("fast", "slow")])
def test_a_feature_that_computes_the_same_reads_the_others_checkpoints(then, today):
    affects, counts_as = {"fast": True, "slow": True}, {"fast": "slow"}
    change = plans.compare_plans(plan(then), plan(today), affects, counts_as)
    assert change.breaking == ()
    assert change.harmless == (
        f"{then} was active when it was written",
        f"{today} was not active when it was written",
    )
    assert "fast was active" in plans.compare_plans(plan("fast"), plan(), affects, counts_as).breaking[0]


def test_a_feature_that_does_not_affect_checkpoints_is_harmless():
    change = compare(plan("a"), plan(), a=False)
    assert change.breaking == ()
    assert "a was active" in change.harmless[0]


@pytest.mark.parametrize("why", ["default", "implied by b"])
def test_a_feature_that_comes_with_the_layout_is_no_change_worth_a_line(why):
    saved = plan("a")
    saved["features"][0]["why"] = why
    assert compare(saved, plan(), a=False) == plans.PlanChange()
    assert compare(plan(), saved, a=False) == plans.PlanChange()
    assert "a was active" in compare(saved, plan(), a=True).breaking[0]


def test_a_feature_that_is_no_longer_installed_breaks_and_names_its_package():
    assert "pip install dist-a" in compare(plan("a"), plan()).breaking[0]


def test_a_feature_that_is_no_longer_installed_is_harmless_where_its_plan_said_so():
    saved = plan("a")
    saved["features"][0]["affects_checkpoint"] = False
    change = compare(saved, plan())
    assert change.breaking == ()
    assert "a was active" in change.harmless[0]


def test_library_versions_are_compared_where_both_know_them():
    changed = models.compare_versions({"torch": "2.6", "x": "1"}, {"torch": "2.7", "y": "1"})
    assert changed == ["torch 2.6 then, 2.7 now"]


def test_the_differing_flags_of_a_model_are_listed():
    saved = models.model_arguments(Namespace(num_layers=2, hidden_size=8, swiglu=False))
    now = models.model_arguments(Namespace(num_layers=4, hidden_size=8, swiglu=False))
    assert models.compare_models(saved, now) == ["--num-layers 2 (checkpoint) / 4 (this run)"]
