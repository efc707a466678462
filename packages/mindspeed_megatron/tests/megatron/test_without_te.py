"""A TransformerEngine that is installed and raises is as good as none."""

from __future__ import annotations

import argparse
import sys

import pytest

from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_megatron.broken_packages import why_unusable
from mindspeed_megatron.devices.without_te import patches_without_te
from mindspeed_megatron.hosts.megatron_lm.without_te import apply_defaults

RAISES = "raise OSError('libcudnn.so.9: cannot open shared object file')\n"
FORMS = {
    "the package raises": {"__init__.py": RAISES},
    "its part for torch raises": {"__init__.py": "", "pytorch/__init__.py": RAISES},
}
WORKS = {"__init__.py": "", "pytorch/__init__.py": ""}
LATENT = "megatron.core.transformer.multi_latent_attention:HAVE_TE"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a TransformerEngine of these files."""
    known = {name: module for name, module in sys.modules.items() if name.startswith("transformer_engine")}
    for name in known:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    why_unusable.cache_clear()

    def install(files):
        for name, text in files.items():
            path = tmp_path / "transformer_engine" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    yield install
    why_unusable.cache_clear()
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    sys.modules.update(known)


@pytest.mark.parametrize("form", FORMS)
def test_latent_attention_takes_no_stand_in_for_a_layer(form, installed):
    installed(FORMS[form])

    assert LATENT in {patch.target for patch in patches_without_te()}
    assert "libcudnn.so.9" in why_unusable("transformer_engine")


def test_one_that_works_is_left_alone(installed):
    installed(WORKS)

    assert LATENT not in {patch.target for patch in patches_without_te()}


@pytest.mark.parametrize("form", FORMS)
def test_a_script_s_default_layers_are_megatron_s_own(form, installed):
    installed(FORMS[form])
    args = argparse.Namespace(transformer_impl="transformer_engine")

    assert "--transformer-impl local" in apply_defaults(args, {}, CpuPlatform)
    assert args.transformer_impl == "local"
