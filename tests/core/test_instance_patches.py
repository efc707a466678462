"""Changes on built instances."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest

from mindspeed_core.errors import PatchError
from mindspeed_core.runtime.instance_patches import Instances


class Rotary:
    base = 10000

    def forward(self):
        return "forward"


def test_method_of_one_instance_is_changed_and_restored():
    instances, changed, other = Instances(), Rotary(), Rotary()
    instances.set("yarn", changed, "forward", lambda: "changed")
    assert (changed.forward(), other.forward()) == ("changed", "forward")
    instances.revert()
    assert changed.forward() == "forward"
    assert "forward" not in vars(changed)


def test_two_changes_of_one_attribute_unwind_to_the_original():
    instances, rotary = Instances(), Rotary()
    rotary.base = 500
    instances.set("a", rotary, "base", 1)
    instances.set("b", rotary, "base", 2)
    instances.revert()
    assert rotary.base == 500


def test_submodule_goes_back_to_its_registration():
    torch = pytest.importorskip("torch")
    model, original = torch.nn.Module(), torch.nn.Linear(2, 2)
    model.linear = original
    instances = Instances()
    instances.set("a", model, "linear", torch.nn.Identity())
    instances.revert()
    assert model._modules["linear"] is original


def test_changes_are_counted_by_owner():
    instances, rotary = Instances(), Rotary()
    instances.set("a", rotary, "base", 1)
    instances.set("a", rotary, "forward", None)
    assert (instances.placed("a"), instances.placed("b")) == (2, 0)


def test_change_is_gone_with_its_instance():
    instances, rotary = Instances(), Rotary()
    instances.set("a", rotary, "base", 1)
    del rotary
    gc.collect()
    assert instances.listing() == []
    instances.revert()


def test_a_new_value_that_holds_its_instance_does_not_keep_it_alive():
    instances, rotary = Instances(), Rotary()
    instances.set("a", rotary, "forward", partial(Rotary.forward, rotary))
    gone = weakref.ref(rotary)
    del rotary
    gc.collect()
    assert gone() is None


def test_dunder_methods_are_refused():
    with pytest.raises(PatchError, match="looked up on the type"):
        Instances().set("a", Rotary(), "__call__", None)


def test_unknown_attribute_is_refused():
    with pytest.raises(PatchError, match="a: Rotary has no attribute 'forwards'"):
        Instances().set("a", Rotary(), "forwards", None)
