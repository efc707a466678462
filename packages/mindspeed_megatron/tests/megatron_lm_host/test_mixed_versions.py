"""A checkout of Megatron-LM beside another megatron-core: both are named, nothing is imported."""

from __future__ import annotations

import pytest

from mindspeed_core.discovery.host import ERROR
from mindspeed_megatron.hosts.megatron_lm import checkout

INFO = 'MAJOR = 0\nMINOR = {}\nPATCH = 1\nPRE_RELEASE = "{}"\n'


@pytest.fixture
def places(tmp_path, monkeypatch):
    """``places(checkout, installed)``: a checkout behind an installed megatron-core, by minor version."""

    def make(expected, found, release=""):
        tree, site = tmp_path / "tree", tmp_path / "site"
        for root, minor in ((tree, expected), (site, found)):
            (root / "megatron" / "core").mkdir(parents=True)
            (root / "megatron" / "core" / "__init__.py").write_text("raise ImportError('not read')")
            (root / "megatron" / "core" / "package_info.py").write_text(INFO.format(minor, release))
        (tree / "megatron" / "training").mkdir()
        (tree / "megatron" / "training" / "__init__.py").write_text("raise ImportError('not read')")
        (tree / "megatron" / "training" / "arguments.py").write_text("")
        folders = [site / "megatron", tree / "megatron"]
        monkeypatch.setattr(checkout, "package_places", lambda name: folders)
        monkeypatch.setattr(checkout, "find_checkout", lambda: tree)
        return tree, site

    return make


def test_both_versions_are_named_with_the_way_out(places):
    tree, site = places(17, 16)

    assert checkout.mixture() == (
        f"megatron.training is of the checkout {tree} (megatron-core 0.17.1), and megatron.core of {site} "
        "(0.16.1); put the checkout first on PYTHONPATH"
    )


def test_the_adaptor_refuses_before_it_imports_either(places):
    places(17, 16)
    with pytest.raises(ImportError, match=r"megatron_adaptor: megatron\.training is of the checkout"):
        checkout.require()


def test_the_doctor_reports_it(places):
    tree, _ = places(17, 16)
    found = [one for one in checkout.findings() if "put the checkout first" in one.observed]

    assert [(one.severity, one.subject) for one in found] == [(ERROR, "Megatron-LM")]
    assert found[0].remedy == f"export PYTHONPATH={tree}:$PYTHONPATH"


def test_the_same_version_twice_is_no_mixture(places):
    places(16, 16)

    assert checkout.mixture() == ""


def test_a_release_candidate_is_another_version(places, tmp_path):
    places(16, 16)
    (tmp_path / "tree" / "megatron" / "core" / "package_info.py").write_text(INFO.format(16, "rc0"))

    assert "(megatron-core 0.16.1rc0)" in checkout.mixture()
