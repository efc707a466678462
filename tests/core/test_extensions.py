"""Loading what packages contribute to an extension point, one by one, without a session."""

import sys

import pytest

from mindspeed_core.discovery.extensions import ExtensionError, Extensions
from mindspeed_core.feature import ExtensionPoint

POINT = ExtensionPoint("demo.planners", "demo.planners", check="demo_checks:check")


@pytest.fixture
def extensions(tmp_path, monkeypatch):
    (tmp_path / "demo_checks.py").write_text("def check(item):\n    assert item != 3, 'three is refused'\n")
    for dist, names in (("one", "zigzag ring three"), ("two", "ring rotten")):
        info = tmp_path / f"demo_{dist}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: demo-{dist}\nVersion: 1.0\n")
        lines = [f"{name} = planner_{name}:PLANNER" for name in names.split()]
        (info / "entry_points.txt").write_text("\n".join(["[demo.planners]", *lines]))
    for name, source in (("zigzag", "PLANNER = 'z'"), ("three", "PLANNER = 3"), ("rotten", "1 / 0")):
        (tmp_path / f"planner_{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, f"planner_{name}", raising=False)
    monkeypatch.delitem(sys.modules, "demo_checks", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Extensions(POINT)


def test_only_the_extension_that_is_asked_for_is_imported(extensions):
    assert extensions.names() == ("ring", "rotten", "three", "zigzag")
    assert extensions.get("zigzag") == "z"
    assert extensions.distribution("zigzag") == "demo-one"
    assert "planner_rotten" not in sys.modules
    assert extensions.broken == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zigzac", r"installed: ring, rotten, three, zigzag\); did you mean 'zigzag'\?"),
        ("ring", "is contributed by demo-one 1.0 and demo-two 1.0"),
        ("three", "demo-one 1.0 .* three is refused"),
        ("rotten", "demo-two 1.0 .* ZeroDivisionError.*pip install --upgrade demo-two"),
    ],
)
def test_an_extension_that_cannot_be_used_is_an_error_that_says_why(extensions, name, message):
    with pytest.raises(ExtensionError, match=message):
        extensions.get(name)


def test_sound_extensions_are_returned_and_the_others_are_recorded_once(extensions):
    for _ in range(2):
        assert extensions.sound() == {"zigzag": "z"}
    found = [(record.entry_point, record.dist) for record in extensions.broken]
    assert found == [
        ("ring", "demo-one"),
        ("ring", "demo-two"),
        ("rotten", "demo-two"),
        ("three", "demo-one"),
    ]
