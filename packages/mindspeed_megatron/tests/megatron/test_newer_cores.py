"""Names of ours for what newer megatron-cores do otherwise, with stand-ins for what they have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import optimizer as optimizers
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from mindspeed_core.errors import ArgumentError
from mindspeed_core.runtime.instance_patches import Instances
from mindspeed_megatron import backward_pass as passes
from mindspeed_megatron.backward_pass import backward_pass
from mindspeed_megatron.fully_sharded import megatron_fsdp
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_megatron.layer_losses import take_expert_losses
from mindspeed_megatron.optimizer_state import groups_told_apart
from mindspeed_megatron.row_counts import count_rows


@pytest.fixture
def record(monkeypatch):
    """The record of losses of megatron-core 0.18: objects in a dictionary that it owns."""
    metrics = {"load_balancing_loss": SimpleNamespace(values=torch.ones(2))}
    monkeypatch.setattr(
        moe_utils, "get_moe_metrics_tracker", lambda: SimpleNamespace(metrics=metrics), raising=False
    )
    return metrics


def test_losses_of_a_newer_record_are_taken_once(record):
    assert take_expert_losses()["load_balancing_loss"].tolist() == [1, 1]
    assert take_expert_losses() == {}


def test_a_second_run_finds_nothing_in_a_newer_record(record):
    destroy_megatron_state()

    assert record == {}


def test_losses_of_the_dictionary_of_0_16_are_taken_once(monkeypatch):
    collected = {"z_loss": {"values": torch.ones(1), "reduce_group": None}, "other": {}}
    monkeypatch.delattr(moe_utils, "get_moe_metrics_tracker", raising=False)
    monkeypatch.setattr(moe_utils, "get_moe_layer_wise_logging_tracker", lambda: collected)

    assert list(take_expert_losses()) == ["z_loss"]
    assert take_expert_losses() == {}


def with_kind(inputs, outputs, gradients, model_type, config):
    return ("with", model_type, config)


def without_kind(inputs, outputs, gradients, config):
    return ("without", config)


@pytest.mark.parametrize(
    ("theirs", "result"), [(with_kind, ("with", None, "c")), (without_kind, ("without", "c"))]
)
def test_a_backward_pass_gives_what_the_function_takes(theirs, result, monkeypatch):
    monkeypatch.setattr(schedules, "backward_step", theirs)
    passes._takes_kind.cache_clear()
    try:
        assert backward_pass(None, None, None, "c") == result
    finally:
        passes._takes_kind.cache_clear()


def test_a_fully_sharded_class_with_other_faults_is_refused(monkeypatch):
    monkeypatch.setattr(megatron_fsdp, "FullyShardedDataParallel", object)
    with pytest.raises(ArgumentError, match="--use-megatron-fsdp: its corrections are those for"):
        megatron_fsdp.wrap_megatron_sharded(None, None, None, [], None)


CHOSEN = torch.tensor([[True, True, False], [False, True, False]])


@pytest.mark.parametrize(("fewer", "rows"), [(True, 3), (False, 4)])
def test_a_dispatcher_sends_the_rows_that_were_chosen(fewer, rows, monkeypatch):
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "preprocess", lambda self, chosen: chosen.sum(0))
    made = object.__new__(MoEAlltoAllTokenDispatcher)
    made.num_out_tokens, made.drop_and_pad, made._maybe_update_cuda_sync_point = 4, False, lambda place: None
    session = SimpleNamespace(instances=Instances())

    count_rows(session, "test", made)(fewer)

    assert made.preprocess(CHOSEN).tolist() == [1, 2, 0]
    assert int(made.num_out_tokens) == rows
    session.instances.revert()
    assert "preprocess" not in vars(made)


def group(kind, **rates):
    return {"wd_mult": kind, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False, **rates}


def test_groups_of_other_rates_are_found_where_rates_tell_groups_apart(monkeypatch):
    keys = ("max_lr", "min_lr", "wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    monkeypatch.setattr(optimizers, "param_group_identifier_keys", keys)
    live = [group(1.0, max_lr=1e-4, min_lr=1e-5), group(0.0, max_lr=1e-4, min_lr=1e-5)]
    saved = [group(0.0, max_lr=6e-4), group(1.0, max_lr=7e-4)]
    inner = SimpleNamespace(optimizer=SimpleNamespace(param_groups=live))

    with groups_told_apart(inner, {"optimizer": {"param_groups": saved}}):
        assert live == [saved[1], saved[0]]
