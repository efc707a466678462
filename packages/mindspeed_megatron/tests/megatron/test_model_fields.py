"""Every field of a model has a verdict: what a checkpoint means to a run where it differs."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest
from megatron.core.transformer import TransformerConfig

from mindspeed_core.errors import CheckpointError
from mindspeed_core.session import Session
from mindspeed_megatron.config_fields import config_fields
from mindspeed_megatron.config_flags import dest_of
from mindspeed_megatron.flags import describing_flags
from mindspeed_megatron.model_comparison import differences
from mindspeed_megatron.model_fields import ARGUMENTS, RULES, Verdict, is_known, rule_of, verdict_of
from mindspeed_megatron.model_record import (
    ModelRecord,
    describe_model,
    from_arguments,
    read_record,
)

OF_MODELS = ("ModelParallelConfig", "TransformerConfig", "MLATransformerConfig")
# Fields of megatron-core 0.15.3 that 0.16.1 still has under other classes or no longer.
OF_0_15 = (
    "moe_router_topk_limited_devices moe_token_dropping tp_comm_split_ag tp_comm_split_rs moe_extended_tp "
    "cuda_graph_use_single_mempool external_cuda_graph enable_cuda_graph moe_layer_recompute mrope_section "
    "rotary_scaling_factor hetereogenous_dist_checkpoint heterogeneous_block_specs flash_decode"
).split()
OF_0_16 = (
    "qk_l2_norm qk_clip attention_output_gate experimental_attention_variant dsa_indexer_topk "
    "linear_attention_freq moe_latent_size moe_shared_expert_gate use_kitchen_attention "
    "fine_grained_activation_offloading batch_invariant_mode mtp_standalone hybrid_context_parallel"
).split()
_HEADINGS = ("model", "megatron-core: model", "megatron-core: multi-latent attention")


def test_every_field_of_the_installed_megatron_core_is_in_the_table():
    names = {field.name for field in config_fields() if field.owner in OF_MODELS}
    assert len(names) > 200
    assert sorted(name for name in names if not is_known(name)) == []


@pytest.mark.parametrize("name", [*OF_0_15, *OF_0_16])
def test_fields_of_both_supported_versions_are_in_the_table(name):
    assert is_known(name)


def test_every_flag_of_the_model_stands_for_fields_of_the_table():
    fields = {dest_of(field.name): field.name for field in config_fields() if field.owner in OF_MODELS}
    unknown = []
    for flag in describing_flags():
        if flag.group in _HEADINGS:
            named = ARGUMENTS.get(flag.dest, (fields.get(flag.dest, flag.dest),))
            unknown += [flag.name for name in named if not is_known(name)]
    assert unknown == []


def test_no_field_is_in_two_rows():
    names = [name for rule in RULES for name in rule.names]
    assert len(names) == len(set(names))


def test_a_field_that_nobody_knows_changes_the_function():
    assert rule_of("of_a_later_version").verdict is Verdict.FUNCTION


@dataclass
class Wider(TransformerConfig):
    """As frameworks have: a configuration with fields of their own."""

    of_a_later_version: float = 1.0


def described(kind=TransformerConfig, **values):
    config = kind(num_layers=2, hidden_size=8, num_attention_heads=2, **values)
    session = SimpleSession()
    return describe_model(config, session, args=None)


class SimpleSession:
    """A session without features, as far as a description asks."""

    def __init__(self):
        self.plan = type("Plan", (), {"names": ()})()
        self.args = Namespace()
        self._records = {}

    state = Session.state


def compared(saved, now):
    return {one.name: (one.saved, one.now, one.verdict) for one in differences(saved, now)}


def test_a_field_of_somebodys_own_class_is_compared():
    found = compared(described(Wider), described(Wider, of_a_later_version=2.0))
    assert found == {"of_a_later_version": (1.0, 2.0, Verdict.FUNCTION)}


def test_a_field_that_the_saving_version_did_not_know_had_its_default():
    assert compared(described(), described(Wider)) == {}
    found = compared(described(), described(Wider, of_a_later_version=2.0))
    assert found == {"of_a_later_version": (1.0, 2.0, Verdict.FUNCTION)}


def test_a_field_that_this_version_does_not_know_must_have_been_off():
    assert compared(described(Wider, of_a_later_version=0.0), described()) == {}
    assert "of_a_later_version" in compared(described(Wider, of_a_later_version=2.0), described())


def test_fields_that_the_model_does_not_use_are_left_alone():
    assert compared(described(), described(moe_router_topk=3)) == {}
    assert compared(described(), described(window_attn_skip_freq=2)) == {}
    assert verdict_of("rotary_base", {"position_embedding_type": "none"}) is Verdict.SILENT
    assert verdict_of("rotary_base", {"position_embedding_type": "rope"}) is Verdict.FUNCTION


@pytest.mark.parametrize("value", [2, [1, 0]])
def test_two_spellings_of_a_pattern_of_layers_are_equal(value):
    experts = {"num_moe_experts": 2, "moe_token_dispatcher_type": "alltoall"}
    one, other = described(moe_layer_freq=2, **experts), described(moe_layer_freq=value, **experts)
    assert compared(one, other) == {}
    assert "moe_layer_freq" in compared(one, described(moe_layer_freq=1, **experts))


def test_only_sinkhorn_makes_the_balance_of_experts_part_of_the_function():
    def verdict(one, other):
        fields = [{"num_moe_experts": 2, "moe_router_load_balancing_type": kind} for kind in (one, other)]
        return verdict_of("moe_router_load_balancing_type", *fields)

    assert verdict("aux_loss", "none") is Verdict.TRAINING
    assert verdict("aux_loss", "sinkhorn") is Verdict.FUNCTION


def test_a_record_survives_the_checkpoint():
    record = described()
    assert read_record(record.as_dict(), "there") == record
    assert read_record(None, "there") is None


@pytest.mark.parametrize(
    "damaged",
    [[], {"config": {}}, {"format": 1, "config": {"a": {1}}, "arguments": {}, "facts": {}}, "text"],
)
def test_a_damaged_record_is_refused(damaged):
    with pytest.raises(CheckpointError, match="there: the record of the model is damaged"):
        read_record(damaged, "there")


def test_a_record_of_a_later_version_is_refused():
    with pytest.raises(CheckpointError, match="format 2"):
        read_record({**described().as_dict(), "format": 2}, "there")


def test_arguments_of_megatron_lm_become_a_record_as_far_as_they_go():
    now = described()
    given = {
        "num_layers": 2,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "ffn_hidden_size": None,
        "group_query_attention": False,
        "num_query_groups": 1,
        "norm_epsilon": 1e-5,
        "swiglu": True,
        "quick_geglu": False,
        "window_size": None,
    }
    saved = from_arguments(given, now)
    assert isinstance(saved, ModelRecord)
    assert not saved.complete
    assert set(compared(saved, now)) == {"gated_linear_unit", "activation_func"}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.verdict is not Verdict.SILENT])
def test_the_documentation_names_every_field_that_is_compared(rule):
    text = (Path(__file__).parents[4] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith(f"| {rule.reason} |"))
    assert [name for name in rule.names if f"`{name}`" not in row] == []
