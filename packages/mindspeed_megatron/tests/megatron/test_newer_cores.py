"""Names of ours for what newer megatron-cores do otherwise, with stand-ins for what they have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.moe import moe_utils

from mindspeed_core.errors import ArgumentError
from mindspeed_megatron import backward_pass as passes
from mindspeed_megatron.backward_pass import backward_pass
from mindspeed_megatron.fully_sharded import megatron_fsdp
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_megatron.layer_losses import take_expert_losses


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
