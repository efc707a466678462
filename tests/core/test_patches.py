"""The patch ledger: every kind of patch, what is refused, and taking it back exactly."""

from __future__ import annotations

import functools
import sys
import types
from dataclasses import replace

import pytest

from mindspeed_core.errors import PatchError
from mindspeed_core.feature import Patch
from mindspeed_core.runtime.patches import PatchLedger

SOURCE = """
import enum, functools

LIMIT = 7

def double(x):
    return 2 * x

def held_as_default(x, function=double):
    return function(x)

class Base:
    def inherited(self):
        return "base"

class Layer(Base):
    scale = 3

    def method(self):
        return "method"

    @classmethod
    def make(cls):
        return cls.__name__

    @staticmethod
    def pure(x):
        return x + 1

    @property
    def size(self):
        return 10

    @functools.cached_property
    def cached(self):
        return "cached"

class Colour(enum.Enum):
    RED = 1

class Slotted:
    __slots__ = ("value",)

slotted = Slotted()
layer = Layer()

def __getattr__(name):
    if name == "made_up":
        return 1
    raise AttributeError(name)
"""


@pytest.fixture
def library(monkeypatch):
    module = types.ModuleType("patched_library")
    monkeypatch.setitem(sys.modules, "patched_library", module)
    exec(compile(SOURCE, "patched_library.py", "exec"), module.__dict__)
    return module


@pytest.fixture
def importer(library, monkeypatch):
    """A module that did ``from patched_library import double as twice``."""
    module = types.ModuleType("patched_importer")
    module.twice = library.double
    monkeypatch.setitem(sys.modules, "patched_importer", module)
    return module


@pytest.fixture
def ledger():
    ledger = PatchLedger()
    yield ledger
    ledger.revert()


def patch(name, new, kind="replace", owner="feature-a", **more):
    return Patch(target=f"patched_library:{name}", new=new, kind=kind, reason="test", owner=owner, **more)


def test_replacing_a_function_reaches_modules_that_imported_it_by_name(library, importer, ledger):
    original = library.double
    ledger.apply([patch("double", lambda x: 20 * x)])
    assert library.double(1) == importer.twice(1) == 20
    ledger.revert()
    assert library.double is original
    assert importer.twice is original


def test_replacing_an_imported_name_everywhere_is_refused_unless_asked_for(library, importer, ledger):
    original = library.double
    of_importer = Patch("patched_importer:twice", lambda x: 20 * x, "test", owner="feature-a")
    expected = r"patched_importer:twice would replace .*patched_library:double too; .* every_name=True"
    with pytest.raises(PatchError, match=expected):
        ledger.apply([of_importer])
    assert library.double is importer.twice is original

    ledger.apply([patch("double", lambda f: f, "wrap")])
    with pytest.raises(PatchError, match=expected):
        ledger.apply([of_importer])

    ledger.apply([replace(of_importer, every_name=True)])
    assert library.double(1) == importer.twice(1) == 20


def test_first_wrap_of_the_plan_is_the_outermost(library, ledger):
    ledger.apply(
        [
            patch("double", lambda f: lambda x: f"a({f(x)})", "wrap", "a"),
            patch("double", lambda f: lambda x: f"b({f(x)})", "wrap", "b"),
        ]
    )
    assert library.double(1) == "a(b(2))"


def test_replace_comes_before_wraps_of_the_same_call(library, ledger):
    ledger.apply(
        [
            patch("double", lambda f: lambda x: f(x) + 1, "wrap", "a"),
            patch("double", lambda x: 100, owner="b"),
        ]
    )
    assert library.double(1) == 101


def test_replace_comes_before_wraps_of_an_earlier_call(library, importer, ledger):
    original = library.double
    ledger.apply([patch("double", lambda f: lambda x: f(x) + 1, "wrap", "a")])
    ledger.apply([patch("double", lambda x: 100, owner="b")])
    assert library.double(1) == importer.twice(1) == 101
    ledger.revert()
    assert library.double is importer.twice is original


def test_wraps_of_a_later_call_go_around_earlier_ones(library, ledger):
    ledger.apply([patch("double", lambda f: lambda x: f"a({f(x)})", "wrap", "a")])
    ledger.apply([patch("double", lambda f: lambda x: f"b({f(x)})", "wrap", "b")])
    assert library.double(1) == "b(a(2))"


def test_one_object_under_two_names_is_patched_once(library, importer, ledger):
    ledger.apply(
        [
            patch("double", lambda f: lambda x: f"a({f(x)})", "wrap", "a"),
            Patch("patched_importer:twice", lambda f: lambda x: f"b({f(x)})", "test", "wrap", owner="b"),
        ]
    )
    assert library.double(1) == importer.twice(1) == "a(b(2))"


def test_method_replaced_and_restored_as_the_same_raw_object(library, ledger):
    original = vars(library.Layer)["method"]
    ledger.apply([patch("Layer.method", lambda self: "new")])
    assert library.layer.method() == "new"
    ledger.revert()
    assert vars(library.Layer)["method"] is original


def test_inherited_method_is_deleted_on_revert(library, ledger):
    ledger.apply([patch("Layer.inherited", lambda f: lambda self: f(self) + "+", "wrap")])
    assert library.layer.inherited() == "base+"
    assert library.Base().inherited() == "base"
    ledger.revert()
    assert "inherited" not in vars(library.Layer)


def test_classmethod_stays_one(library, ledger):
    original = vars(library.Layer)["make"]
    ledger.apply([patch("Layer.make", lambda f: lambda cls: f(cls).lower(), "wrap")])
    assert library.Layer.make() == library.layer.make() == "layer"
    ledger.revert()
    assert vars(library.Layer)["make"] is original


def test_staticmethod_stays_one(library, ledger):
    original = vars(library.Layer)["pure"]
    ledger.apply([patch("Layer.pure", lambda x: x + 5)])
    assert library.Layer.pure(1) == library.layer.pure(1) == 6
    ledger.revert()
    assert vars(library.Layer)["pure"] is original


def test_property_stays_one(library, ledger):
    original = vars(library.Layer)["size"]
    ledger.apply([patch("Layer.size", lambda fget: lambda self: fget(self) + 1, "wrap")])
    assert library.layer.size == 11
    ledger.revert()
    assert vars(library.Layer)["size"] is original


def test_cached_property_caches_the_new_value(library, ledger):
    original = vars(library.Layer)["cached"]
    ledger.apply([patch("Layer.cached", lambda self: "new")])
    fresh = library.Layer()
    assert fresh.cached == "new"
    assert vars(fresh)["cached"] == "new"
    ledger.revert()
    assert vars(library.Layer)["cached"] is original
    assert isinstance(original, functools.cached_property)


def test_module_constant_is_changed_in_its_module_only(library, importer, ledger):
    importer.seven = 7
    ledger.apply([patch("LIMIT", 8)])
    assert library.LIMIT == 8
    assert importer.seven == 7
    ledger.revert()
    assert library.LIMIT == 7


def test_missing_name_is_added_and_deleted(library, ledger):
    ledger.apply([patch("missing_name", None, "add")])
    assert vars(library)["missing_name"] is None
    ledger.revert()
    assert "missing_name" not in vars(library)


def test_adding_leaves_an_existing_name_alone(library, ledger):
    ledger.apply([patch("LIMIT", 0, "add")])
    assert library.LIMIT == 7
    assert ledger.skipped[0].why == "the name exists, nothing to add"


def test_replacement_is_loaded_by_name(library, ledger):
    ledger.apply([patch("double", "math:sqrt")])
    assert library.double(9) == 3


def test_replacement_that_cannot_be_loaded_is_named(library, ledger):
    with pytest.raises(
        PatchError, match=r"feature-a: the replacement math:squirt for patched_library:double"
    ):
        ledger.apply([patch("double", "math:squirt")])


def test_also_names_a_further_holder(library, importer, ledger):
    importer.other = lambda x: -x
    original = importer.other
    ledger.apply([patch("double", lambda x: 50, also=("patched_importer:other",))])
    assert importer.other(1) == 50
    ledger.revert()
    assert importer.other is original


def test_module_imported_while_open_gets_the_original_back(library, ledger, monkeypatch):
    original = library.double
    ledger.apply([patch("double", lambda f: lambda x: -f(x), "wrap")])
    late = types.ModuleType("late_importer")
    late.double = library.double
    monkeypatch.setitem(sys.modules, "late_importer", late)
    ledger.revert()
    assert late.double is original


def test_another_package_keeps_the_replacement_under_its_own_name(library, ledger, monkeypatch):
    class Extension:
        pass

    library.optional_extension = None
    ledger.apply([patch("optional_extension", Extension)])
    late = types.ModuleType("other_package")
    late.Extension, late.optional_extension = Extension, library.optional_extension
    monkeypatch.setitem(sys.modules, "other_package", late)
    ledger.revert()

    assert late.Extension is Extension
    assert late.optional_extension is None


def test_package_that_defines_the_replacement_keeps_it_in_late_modules(library, ledger, monkeypatch):
    home = types.ModuleType("plugin_package")
    home.fused = lambda x: 3 * x
    monkeypatch.setitem(sys.modules, "plugin_package", home)
    ledger.apply([patch("double", "plugin_package:fused")])
    late = types.ModuleType("plugin_package.late")
    late.fused = home.fused
    monkeypatch.setitem(sys.modules, "plugin_package.late", late)
    ledger.revert()
    assert late.fused is home.fused
    assert home.fused(1) == 3


def test_one_replacement_of_two_targets_gives_late_holders_the_right_original(library, ledger, monkeypatch):
    library.triple = original = lambda x: 3 * x
    new = lambda x: 0  # noqa: E731
    ledger.apply([patch("double", new), patch("triple", new)])
    late = types.ModuleType("late_importer")
    late.triple = library.triple
    monkeypatch.setitem(sys.modules, "late_importer", late)
    ledger.revert()
    assert late.triple is original


def test_two_replaces_name_both_owners_and_change_nothing(library, ledger):
    original = library.double
    with pytest.raises(PatchError, match="replaced by both feature-a and feature-b"):
        ledger.apply([patch("double", len), patch("double", max, owner="feature-b")])
    assert library.double is original
    assert ledger.listing() == []


def test_failure_after_an_earlier_call_keeps_the_earlier_state_revertible(library, importer, ledger):
    original = library.double
    ledger.apply([patch("double", len, owner="a")])
    with pytest.raises(PatchError, match="both a and b"):
        ledger.apply([patch("LIMIT", 9, owner="b"), patch("double", max, owner="b")])
    assert library.LIMIT == 7
    ledger.revert()
    assert library.double is importer.twice is original


@pytest.mark.parametrize(
    "target", ["patched_library:absent", "patched_library:Layer.absent", "no_such_module:x"]
)
def test_missing_target_names_owner_target_and_way_out(library, ledger, target):
    with pytest.raises(PatchError, match=r"owner-x: cannot patch .*turn the feature off") as caught:
        ledger.apply([Patch(target, len, "test", owner="owner-x")])
    assert target in str(caught.value)


def test_optional_patch_without_target_is_skipped(library, ledger):
    ledger.apply([patch("absent", len, required=False)])
    assert ledger.listing() == []
    assert "absent" in ledger.skipped[0].why


def test_patch_for_another_version_is_an_error(library, ledger):
    with pytest.raises(
        PatchError, match=r"written for megatron-core<0.1, but megatron-core 0\.\d+\.\d+ is inst"
    ):
        ledger.apply([patch("double", len, versions="megatron-core<0.1")])


def test_optional_patch_for_another_version_is_skipped(library, ledger):
    ledger.apply([patch("double", len, versions="megatron-core<0.1", required=False)])
    assert library.double(2) == 4
    assert "written for megatron-core<0.1" in ledger.skipped[0].why


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Base", "loaded subclasses"),
        ("Colour.RED", "member of an enumeration"),
        ("Slotted.value", "is a slot"),
        ("slotted.anything", "have __slots__"),
        ("layer.__call__", "looked up on the type"),
        ("made_up", "__getattr__"),
    ],
)
def test_patches_without_effect_are_refused(library, ledger, name, reason):
    with pytest.raises(PatchError, match=f"feature-a: cannot patch patched_library:{name}: .*{reason}"):
        ledger.apply([patch(name, lambda self: None)])


def test_immutable_types_are_refused(ledger):
    with pytest.raises(PatchError, match="immutable type"):
        ledger.apply([Patch("builtins:list.append", len, "test", owner="a")])


def test_class_without_subclasses_is_replaced_as_a_whole(library, ledger):
    class Other:
        pass

    original = library.Layer
    ledger.apply([patch("Layer", Other)])
    assert library.Layer is Other
    ledger.revert()
    assert library.Layer is original


def test_somebody_elses_later_change_is_reported_and_the_rest_restored(library, importer):
    ledger = PatchLedger()
    original = library.double
    ledger.apply([patch("double", lambda x: 0)])
    mine = lambda x: "mine"  # noqa: E731
    importer.twice = mine
    with pytest.raises(PatchError, match=r"patched_importer:twice .*feature-a.*somebody changed it after us"):
        ledger.revert()
    assert library.double is original
    assert importer.twice is mine


def test_settings_are_undone_in_reverse_order(ledger):
    done = []
    for name in ("first", "second"):
        ledger.setting(
            name,
            lambda name=name: done.append(name),
            lambda name=name: done.append("-" + name),
            owner="a",
            reason="test",
        )
    ledger.revert()
    assert done == ["first", "second", "-second", "-first"]


def test_listing_tells_target_owner_kind_reason_and_places(library, importer, ledger):
    ledger.apply([patch("double", lambda f: f, "wrap", "")], owner="host")
    (entry,) = ledger.listing()
    assert (entry.target, entry.owner, entry.kind, entry.reason) == (
        "patched_library:double",
        "host",
        "wrap",
        "test",
    )
    assert set(entry.holders) == {"patched_library:double", "patched_importer:twice"}


def test_modules_are_never_asked_for_attributes_they_make_up(library, ledger, monkeypatch):
    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise AssertionError(f"the scan asked a lazy module for {name}")

    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    ledger.apply([patch("double", lambda x: 1)])
    assert library.double(5) == 1
    ledger.revert()
