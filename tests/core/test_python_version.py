"""A Python that is too old is named, where a checkout on the module path asks no installer."""

from __future__ import annotations

import importlib.util
import sys

import pytest

import mindspeed_core


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 8, 1)])
def test_an_older_python_is_named(version, monkeypatch):
    spec = importlib.util.spec_from_file_location("mindspeed_core_again", mindspeed_core.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(ImportError, match=r"needs Python 3\.10 or newer") as failure:
        spec.loader.exec_module(module)

    assert str(failure.value).endswith("is Python " + ".".join(map(str, version)))
