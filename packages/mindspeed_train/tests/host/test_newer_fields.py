"""Fields of newer megatron-cores: each has one verdict, whichever version is installed."""

from __future__ import annotations

from argparse import Namespace

import pytest

from mindspeed_megatron.config_flags import EXCLUDED
from mindspeed_megatron.newer_fields import ACTING, newer_fields
from mindspeed_train.arguments import refusals
from mindspeed_train.arguments.refusals import REFUSALS, stands_against

REFUSED = {refusal.dest for refusal in REFUSALS}


def test_every_field_of_the_newest_recorded_megatron_core_has_one_verdict():
    newer = {one.name for one in newer_fields()}
    assert len(newer) > 80
    verdicts = {name: [name in ACTING, name in EXCLUDED, name in REFUSED].count(True) for name in newer}
    assert {name: count for name, count in verdicts.items() if count != 1} == {}


def test_no_verdict_is_about_a_field_that_no_recorded_version_has():
    assert ACTING.keys() - {one.name for one in newer_fields()} == set()


@pytest.mark.parametrize(
    ("dest", "default", "value", "refused"),
    [
        ("moe_mlp_glu_interleave_size", None, 32, True),
        ("activation_offload_fraction", 1.0, 0.0, True),
        ("activation_offload_fraction", 1.0, 1.0, False),
        ("dsa_indexer_rotate_activation", True, False, True),
    ],
)
def test_a_field_of_a_newer_version_is_refused_where_it_is_set(dest, default, value, refused, monkeypatch):
    """Also where the installed megatron-core has no such field."""
    (refusal,) = [refusal for refusal in REFUSALS if refusal.dest == dest]
    monkeypatch.setattr(refusals, "_defaults", lambda: {dest: default})
    args = Namespace(transformer_impl="local", **{dest: value})

    assert stands_against(refusal, args, ("cpu",)) is refused
    assert not stands_against(refusal, Namespace(transformer_impl="local"), ("cpu",))


@pytest.mark.parametrize(("value", "refused"), [(True, False), (False, True)])
def test_splitting_for_muon_is_on_without_a_flag_where_no_field_says_so(value, refused, monkeypatch):
    """megatron-core 0.15 has no such field, and mindspeed-optim's flag sets the attribute."""
    (refusal,) = [refusal for refusal in REFUSALS if refusal.dest == "muon_split_qkv"]
    monkeypatch.setattr(refusals, "_defaults", dict)
    args = Namespace(transformer_impl="local", muon_split_qkv=value)

    assert stands_against(refusal, args, ("cpu",)) is refused
