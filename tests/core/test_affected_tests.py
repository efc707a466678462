"""The tests that a change can touch are found by import."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from affected_tests import affected

SOURCES = {
    "mindspeed_core/__init__.py": "from mindspeed_core.session import Session\nimport mindspeed_core.run",
    "mindspeed_core/run.py": "",
    "mindspeed_core/session.py": "",
    "mindspeed_core/step.py": "def step(): from mindspeed_core.loss import loss",
    "mindspeed_core/loss.py": '"""Not mindspeed_core.session."""',
    "packages/mindspeed_megatron/src/mindspeed_megatron/hosts/__init__.py": "",
    "packages/mindspeed_train/src/mindspeed_train/__init__.py": (
        "_HERE = 'mindspeed_train.'\nSTAGES = (_HERE + 'model',)"
    ),
    "packages/mindspeed_train/src/mindspeed_train/model.py": "",
    "plugins/acme/src/acme/__init__.py": "",
    "plugins/acme/src/acme/patches.py": "TARGET = 'mindspeed_core.loss:loss'",
    "plugins/acme/tests/test_acme.py": "import acme.patches",
    "tests/core/conftest.py": "import helper",
    "tests/core/helper.py": "",
    "tests/core/test_step.py": "from mindspeed_core.step import step",
    "tests/core/test_session.py": "from mindspeed_core import Session",
    "packages/mindspeed_train/tests/host/helper.py": "",
    "packages/mindspeed_train/tests/host/test_host.py": "import helper\nactivate(host='standalone')",
    "tests/docs/test_pages.py": "",
}
EVERY = {path for path in SOURCES if path.rpartition("/")[2].startswith("test_")}


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        pytest.param(
            "packages/mindspeed_train/tests/host/test_host.py",
            {"packages/mindspeed_train/tests/host/test_host.py"},
            id="a test itself",
        ),
        pytest.param("mindspeed_core/step.py", {"tests/core/test_step.py"}, id="imported directly"),
        pytest.param(
            "mindspeed_core/loss.py",
            {"tests/core/test_step.py", "plugins/acme/tests/test_acme.py"},
            id="through another module, and by the text of a patch",
        ),
        pytest.param("mindspeed_core/session.py", {"tests/core/test_session.py"}, id="exported by a package"),
        pytest.param("mindspeed_core/run.py", set(), id="imported by a package on the way only"),
        pytest.param(
            "packages/mindspeed_train/src/mindspeed_train/model.py",
            {"packages/mindspeed_train/tests/host/test_host.py"},
            id="by host",
        ),
        pytest.param(
            "packages/mindspeed_train/tests/host/helper.py",
            {"packages/mindspeed_train/tests/host/test_host.py"},
            id="the helper of the same folder",
        ),
        pytest.param(
            "tests/core/conftest.py", {"tests/core/test_step.py", "tests/core/test_session.py"}, id="conftest"
        ),
        pytest.param("docs/page.md", {"tests/docs/test_pages.py"}, id="a page"),
        pytest.param("plugins/acme/tests/recorded.json", {"plugins/acme/tests/test_acme.py"}, id="data"),
        pytest.param("pyproject.toml", EVERY, id="what configures everything"),
    ],
)
def test_a_change_chooses_the_tests_that_reach_it(changed, chosen):
    assert set(affected([changed], SOURCES)) == chosen


def test_an_executed_package_chooses_every_test_that_passes_it():
    chosen = affected(["mindspeed_core/__init__.py"], SOURCES)

    assert {"tests/core/test_step.py", "tests/core/test_session.py"} <= set(chosen)


def test_a_deleted_module_chooses_those_who_still_import_it():
    sources = {path: text for path, text in SOURCES.items() if path != "mindspeed_core/step.py"}

    assert affected(["mindspeed_core/step.py"], sources) == ["tests/core/test_step.py"]
