"""Import paths of modules that became distributions of their own, and parts that those supply."""

import subprocess
import sys
from importlib import import_module

import pytest

from mindspeed_core import moved
from mindspeed_core.discovery import parts
from mindspeed_core.errors import UserError

OF_AUTHORS = (
    "mindspeed_core.testing:run_world",
    "mindspeed_core.testing:WorldError",
    "mindspeed_core.testing.contract:contract_checks",
    "mindspeed_core.testing.model_flags:training_flags",
    "mindspeed_core.testing.scenarios:scenario_parameters",
    "mindspeed_core.testing.verify:verify",
    "mindspeed_core.hosts.standalone:HOST",
    "mindspeed_core.hosts.standalone.loop:setup",
    "mindspeed_core.hosts.library.session:LibrarySession",
    "mindspeed_core.megatron.batch_fields",
    "mindspeed_core.megatron.experts:mark_expert_parameters",
    "mindspeed_core.megatron.feature_state:like_parameters",
    "mindspeed_core.megatron.gradient_norm:squared_norm_share",
    "mindspeed_core.megatron.group_options:OF_OWN_GROUPS",
    "mindspeed_core.megatron.layer_losses",
    "mindspeed_core.megatron.model_state:count_as_loaded",
    "mindspeed_core.megatron.parameter_gather:wait_for_parameters",
    "mindspeed_core.megatron.plain_norm:PlainNorm",
    "mindspeed_core.megatron.schedule:announced",
    "mindspeed_core.megatron.unwrap:unwrap",
    "mindspeed_core.instruments.memory:TensorBytes",
    "mindspeed_core.platforms.fake.platform:FakePlatform",
    "mindspeed_core.layer_spec:LinearLayout",
    "mindspeed_core.flags.given:Given",
    "mindspeed_core.runtime.reports:Report",
    "mindspeed_core.terminal.tables:print_table",
)
"""Earlier names that plugins and pages used."""


@pytest.mark.parametrize("name", OF_AUTHORS)
def test_an_earlier_import_path_is_the_module_of_today(name):
    old, _, attribute = name.partition(":")
    module = import_module(old)

    assert module is import_module(moved.present_name(old))
    assert module.__name__ == module.__spec__.name == moved.present_name(old)
    assert not attribute or hasattr(module, attribute)


def test_every_place_in_the_table_exists():
    from importlib.util import find_spec

    assert [new for new in moved.MOVED.values() if find_spec(new) is None] == []


def test_an_earlier_path_of_an_absent_distribution_says_what_to_install(monkeypatch):
    monkeypatch.setitem(moved.MOVED, "mindspeed_core.acme", "mindspeed_acme")

    with pytest.raises(ModuleNotFoundError, match=r"belongs to mindspeed-acme.*pip install mindspeed-acme"):
        import_module("mindspeed_core.acme.thing")


def test_a_name_that_never_was_is_still_missing():
    with pytest.raises(ModuleNotFoundError, match=r"mindspeed_core\.megatron\.no_such"):
        import_module("mindspeed_core.megatron.no_such")


def test_a_moved_module_runs_under_its_earlier_name():
    command = [sys.executable, "-m", "mindspeed_core.cli.doctor.probe"]

    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


def test_a_part_without_its_supplier_says_what_to_install(monkeypatch):
    monkeypatch.setattr(parts, "_parts", dict)

    with pytest.raises(UserError, match=r"put_inside comes with mindspeed-megatron"):
        parts.part("put_inside")


def test_a_supplier_that_lacks_a_part_is_too_old(monkeypatch):
    monkeypatch.setattr(parts, "_parts", lambda: {"put_inside": None})

    with pytest.raises(UserError, match="older than this core: pip install --upgrade mindspeed-megatron"):
        parts.part_if_installed("patches_of_cpu")
