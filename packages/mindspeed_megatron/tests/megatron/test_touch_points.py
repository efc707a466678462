"""Touch points: records are those of the sources, and each kind of change in a newer version is seen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mindspeed_core.discovery.installed import installed_version
from mindspeed_megatron.touch_points.changes import changes, refusal
from mindspeed_megatron.touch_points.record import index, known_uses, known_version, nearest
from mindspeed_megatron.touch_points.sources import FOREIGN, Sources
from mindspeed_megatron.touch_points.survey import sources_place
from mindspeed_megatron.touch_points.untyped import METHODS
from mindspeed_megatron.touch_points.uses import CallShape, package_sources, uses_of

ROOT = Path(__file__).parents[4]
AGAIN = "run nox -s touch_points, which records the touch points of every version again"
OURS = """
from megatron.core.parts import Holder, made
from megatron.core import numbers

class Mine(Holder):
    def start(self, first):
        return super().start(first, again=True)

made(1, 2, kind="a")
numbers.counted()
"""
THEIRS = {
    "megatron/core/__init__.py": "",
    "megatron/core/parts/__init__.py": "from .inner import *\n",
    "megatron/core/parts/inner.py": (
        "import torch\n"
        "class Holder(torch.nn.Module):\n"
        "    def start(self, first, again=False):\n"
        "        return first\n"
        "def made(one, two, *, kind):\n"
        "    return one\n"
    ),
    "megatron/core/numbers.py": "def counted():\n    return 1\n",
}


@pytest.fixture(scope="module")
def tool():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import touch_points
    finally:
        sys.path.pop(0)
    return touch_points


@pytest.fixture(scope="module")
def installed():
    place = sources_place()
    assert place is not None
    return Sources.of_folder(place)


def changed(path, before, after):
    """The changes of the sources above, after one edit of megatron-core."""
    edited = {**THEIRS, path: THEIRS[path].replace(before, after)}
    assert edited != THEIRS
    uses = uses_of({"ours": OURS})
    then = Sources(THEIRS.get)
    known = {point: symbol for point in uses if (symbol := then.symbol(point)) is not None}
    return [
        f"{change}{' !' if change.breaks else ''}"
        for change in changes(uses, known, Sources(edited.get).symbol)
    ]


def test_the_recorded_uses_are_those_of_the_sources(tool, installed):
    recorded, uses = known_uses()
    folders = tool.packages()
    present = uses_of(package_sources(folders))
    own = {
        point: use
        for point, use in present.items()
        if point in uses or ((found := installed.symbol(point)) is not None and found.kind != FOREIGN)
    }

    assert {folder.name for folder in folders} == recorded
    assert {point for point in own if own[point] != uses.get(point)} == set(), AGAIN
    assert uses.keys() - own.keys() == set(), AGAIN


def test_the_record_of_the_installed_version_is_that_of_its_sources(installed):
    version = installed_version("megatron-core")
    _, uses = known_uses()
    symbols = known_version(version).symbols

    assert {point for point in uses if (installed.symbol(point) is None) != (point not in symbols)} == set()
    assert changes(uses, symbols, installed.symbol) == []
    assert changes(uses, {p: s for p in uses if (s := installed.symbol(p))}, symbols.get) == []


@pytest.mark.parametrize(
    ("path", "before", "after", "expected"),
    [
        ("numbers", "def counted", "def count", ["numbers.counted is gone !"]),
        ("parts/inner", "class Holder", "class Held", ["parts.Holder is gone !"]),
        (
            "parts/inner",
            "def start",
            "def begin",
            ["parts.Holder.start is not megatron-core's own any more !"],
        ),
        ("parts/inner", "*, kind", "*, sort", ["parts.made takes no kind !"]),
        ("parts/inner", "*, kind", "*, kind, name", ["parts.made asks for name !"]),
        ("parts/inner", "one, two, *", "one, *", ["parts.made takes 1 arguments by position, not 2 !"]),
        ("parts/inner", "again=False", "later=False", ["parts.Holder.start takes no again !"]),
        ("parts/inner", "again=False", "again=False, at=0", ["parts.Holder.start takes at too"]),
        ("parts/inner", "return first", "return 2 * first", ["parts.Holder.start has another source"]),
        (
            "parts/inner",
            "class Holder(torch.nn.Module):",
            "def Holder():\n  class H:",
            ["parts.Holder is a function and was a class !"],
        ),
    ],
)
def test_a_change_is_named(path, before, after, expected):
    assert changed(f"megatron/core/{path}.py", before, after) == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return first", "# first\n        return first"),
        ("return one", "return one + two"),
        ("*, kind", "*, kind, name=None"),
        ("import torch\n", "import torch\nimport math\n"),
    ],
)
def test_what_no_use_can_notice_is_no_change(before, after):
    assert changed("megatron/core/parts/inner.py", before, after) == []


def test_a_method_that_one_class_has_is_found_without_the_class():
    uses = uses_of({"ours": "def reload(run):\n    run.optimizer.reload_model_params(state_dict=1)\n"})

    assert {*uses} == {*METHODS["reload_model_params"]}
    assert all(use.optional and use.calls == {CallShape(0, ("state_dict",))} for use in uses.values())


def test_methods_without_a_written_class_are_called_and_there(installed):
    _, recorded = known_uses()
    points = {point for named in METHODS.values() for point in named}

    assert {point for point in points if not getattr(recorded.get(point), "calls", ())} == set()
    assert {
        point for point in points if (found := installed.symbol(point)) is None or found.kind == FOREIGN
    } == set()


def test_calls_of_what_takes_anything_are_taken():
    symbol = Sources({"megatron/core/a.py": "def f(a, *more, **named): pass"}.get).symbol("megatron.core.a.f")

    assert refusal(symbol, CallShape(5, ("x",))) == ""
    assert refusal(symbol, CallShape(0, ("x",))) == "asks for a"
    assert refusal(symbol, CallShape(0, ("x",), exact=False)) == ""


def test_the_fields_of_a_dataclass_come_with_those_of_its_bases(installed):
    latent = installed.symbol("megatron.core.transformer.MLATransformerConfig")

    assert {"hidden_size", "q_lora_rank"} <= {*latent.fields}


@pytest.mark.parametrize(
    ("version", "compared"),
    [("0.14.0", "first"), ("0.16.9", "0.16.1"), ("0.16.0rc1", "0.16.0"), ("99.0", "last")],
)
def test_a_version_is_compared_with_the_closest_of_its_minor_or_the_one_before(version, compared):
    expected = {"first": next(iter(index())), "last": list(index())[-1]}

    assert nearest(version) == expected.get(compared, compared)
