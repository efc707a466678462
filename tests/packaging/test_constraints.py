"""The megatron-core of each Python in `constraints.txt` and in nox, and the tests that others leave out."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from mindspeed_megatron.doctor.supported_versions import MEGATRON_CORE, matches

ROOT = Path(__file__).resolve().parents[2]
BODY = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8")).body
CLASSIFIER = r"Programming Language :: Python :: (3\.\d+)"
PYTHONS = re.findall(CLASSIFIER, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def constrained(text, python):
    """Return the versions that constraints hold megatron-core to on a Python."""
    required = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    return [
        next(iter(one.specifier)).version
        for one in required
        if one.name == "megatron-core"
        and (one.marker is None or one.marker.evaluate({"python_version": python}))
    ]


def constant(name):
    """Return a constant of noxfile.py, whose import needs nox."""
    return next(
        ast.literal_eval(node.value)
        for node in BODY
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name
    )


@pytest.mark.parametrize("python", PYTHONS)
def test_each_python_gets_the_newest_core_that_is_tried_on_it(python):
    (version,) = constrained((ROOT / "constraints.txt").read_text(encoding="utf-8"), python)
    assert matches(version, MEGATRON_CORE)
    # The first megatron-core that refuses Python 3.10 and 3.11 is 0.17.
    assert (Version(version) >= Version("0.17")) == (Version(python) >= Version("3.12"))
    assert (python, version) in constant("COMPAT") or version == constant("SUITE")


@pytest.mark.parametrize(
    "name",
    sorted(
        {name for reasons in constant("LEFT_OUT").values() for names in reasons.values() for name in names}
    ),
)
def test_every_test_that_a_core_is_not_held_to_exists(name):
    path, _, test = name.partition("::")
    files = [ROOT / path] if (ROOT / path).exists() else list(ROOT.glob(f"{path}*.py"))
    assert files
    if test:
        (text,) = (file.read_text(encoding="utf-8") for file in files)
        assert f"def {test.partition('[')[0]}" in text


@pytest.mark.parametrize("python", PYTHONS)
def test_sessions_of_the_suite_are_held_to_its_core_on_every_python(tmp_path, python):
    function = next(node for node in BODY if getattr(node, "name", "") == "suite_constraints")
    function.args.args[0].annotation = None
    names = {"ROOT": ROOT, "SUITE": constant("SUITE")}
    exec(compile(ast.Module([function], []), "noxfile.py", "exec"), names)
    written = Path(names["suite_constraints"](SimpleNamespace(cache_dir=tmp_path))).read_text(
        encoding="utf-8"
    )
    assert constrained(written, python) == [constant("SUITE")]
    assert "torch==2.13.0" in written.splitlines()
