"""The declarations: sound, documented, free of heavy imports."""

import subprocess
import sys
from importlib.resources import files

import pytest

from mindspeed_core import check_feature
from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_memory.features import DECLARATIONS

FEATURES = declared_features(DECLARATIONS)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_declarations_are_sound(feature):
    assert check_feature(feature) == []


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_every_feature_has_its_page(feature):
    package, _, path = feature.docs.partition(":")
    page = files(package).joinpath(path).read_text(encoding="utf-8")
    assert all(flag.name in page for flag in feature.flags)


def test_nothing_of_megatron_core_is_patched():
    assert [feature.name for feature in FEATURES if feature.patches] == []


def test_declarations_import_neither_torch_nor_megatron():
    code = "import sys, mindspeed_memory.features; print({'torch', 'megatron', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
