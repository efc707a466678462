"""Every call of torch_npu against the builds that the compatibility table names, without any of them."""

import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mindspeed_megatron.doctor.supported_versions import NPU_CANN, NPU_WITHOUT_CANN
from mindspeed_testing.npu.builds import guards, published, unserved

ROOT = Path(__file__).parents[2]
SOURCES = [
    ROOT / "mindspeed_core",
    *sorted(
        path
        for path in (*ROOT.glob("packages/*/src/*"), *ROOT.glob("plugins/*/src/*"))
        if path.name != "mindspeed_testing"
    ),
]


def test_every_build_takes_every_call_or_is_asked_first():
    assert [str(one) for one in unserved(SOURCES)] == []


@pytest.mark.parametrize("cann", sorted(NPU_CANN))
def test_builds_of_the_compatibility_table_are_recorded(cann):
    assert set(NPU_CANN[cann]) <= set(published())


def test_every_recorded_build_is_in_the_compatibility_table():
    named = [build for builds in NPU_CANN.values() for build in builds]
    assert sorted({*named, *NPU_WITHOUT_CANN}) == sorted(published())


@pytest.fixture
def source(tmp_path):
    def write(text):
        (tmp_path / "acme.py").write_text(text)
        return [tmp_path]

    return write


CALL = "import torch_npu\ntorch_npu.npu_grouped_matmul_add_(y, x, w, l, group_list_type=1)\n"


def test_a_keyword_that_a_build_lacks_is_named_with_the_builds(source):
    [found] = unserved(source(CALL))

    assert found.lacking == ("group_list_type",)
    assert "2.9.0" in found.builds
    assert "2.9.0.post6" not in found.builds


def test_a_name_that_no_build_has_is_absent_everywhere(source):
    [found] = unserved(source("import torch_npu\ntorch_npu.npu_no_such_kernel(1)\n"))

    assert found.builds == published()


def test_a_call_that_is_asked_for_first_passes(source):
    folders = source(CALL + "call_missing('npu_grouped_matmul_add_', 'group_list_type')\n")

    assert guards(folders)["npu_grouped_matmul_add_"] >= {"group_list_type"}
    assert unserved(folders) == []


def test_the_extra_asks_for_a_build_that_was_compared():
    [asked] = re.findall(r'"torch_npu([<>=][^"]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    specifier = SpecifierSet(asked)

    assert [build for build in published() if build not in specifier] == []
    newest = Version(published()[-1])
    assert f"{newest.major}.{newest.minor + 1}.0" not in specifier
