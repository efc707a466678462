"""A rank's range of a flattened parameter is described by boxes of the parameter, exactly."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from mindspeed_megatron.distributed_state import _pieces, _ranges_of, boxes, every_rank_holds_parameters


@pytest.mark.parametrize("shape", [(7,), (3, 4), (4, 1), (1, 5), (2, 3, 4), (3, 1, 2, 2)])
def test_boxes_hold_every_range_in_order(shape):
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for start, stop in itertools.combinations(range(tensor.numel() + 1), 2):
        found = list(boxes(shape, start, stop))
        parts = [tensor[tuple(map(lambda o, s: slice(o, o + s), *box))].reshape(-1) for box in found]
        assert torch.cat(parts).tolist() == list(range(start, stop))
        assert all(part.numel() for part in parts)
        assert len(found) <= 2 * len(shape) - 1


def test_an_empty_range_has_no_box():
    assert list(boxes((2, 3), 4, 4)) == []


def test_a_number_is_one_box():
    assert list(boxes((), 0, 1)) == [((), ())]


def factory(parameter, split):
    def build(key, data, replica, flat):
        return [ShardedTensor.from_rank_offsets(f"{key}.{i}", part) for i, part in enumerate(split(data))]

    return ShardedTensorFactory("weight", parameter, build, lambda parts: torch.cat(parts), (0, 0, 0))


def test_halves_of_a_gated_weight_are_ranges():
    parameter = torch.zeros(6, 4)
    found = _ranges_of(factory(parameter, lambda data: data.chunk(2)), parameter)
    assert [(start, tuple(whole.local_shape)) for start, whole in found] == [(0, (3, 4)), (12, (3, 4))]


@pytest.mark.parametrize(
    "split",
    [lambda data: [data.t()], lambda data: [data.t().contiguous()], lambda data: [data[:2]]],
    ids=["transposed", "copied", "in part"],
)
def test_a_weight_that_is_described_otherwise_is_left_to_megatron_core(split):
    parameter = torch.zeros(6, 4)
    assert _ranges_of(factory(parameter, split), parameter) is None


@pytest.mark.parametrize(
    ("parameters", "everyone"),
    [([(0, 30), (30, 100)], True), ([(0, 25), (60, 100)], False), ([(0, 51)], False)],
)
def test_ranks_without_parameters_are_known_without_asking(parameters, everyone):
    bucket = SimpleNamespace(bucket_id=0, offset=0, grad_data=torch.empty(100))
    index = {number: (start, stop, 0) for number, (start, stop) in enumerate(parameters)}
    buffer = SimpleNamespace(buckets=[bucket], param_index_map=index)
    group = SimpleNamespace(size=lambda: 4)
    inner = SimpleNamespace(buffers=[buffer], data_parallel_group=group)
    assert every_rank_holds_parameters(inner) == everyone


def test_what_is_made_for_a_save_leaves_the_device_and_what_is_kept_stays(monkeypatch):
    parameter, main, first, made = torch.zeros(2, 3), torch.zeros(6), torch.zeros(6), torch.zeros(6)
    described = {"param": main, "exp_avg": first.view(2, 3), "exp_avg_sq": made}
    inner = SimpleNamespace(
        model_param_group_index_map={parameter: (0, 0)},
        optimizer=SimpleNamespace(param_groups=[{"params": [main]}], state={main: {"kept": first}}),
        _get_main_param_and_optimizer_states=lambda parameter: described,
        distributed_optimizer_instance_id=0,
    )
    moved, to_host = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moved.append(self.data_ptr()) or to_host(self))
    whole = ShardedTensor.from_rank_offsets("weight", parameter, replica_id=(0, 0, 0))
    found = _pieces(inner, parameter, [(0, whole)], (0, 6))
    assert found.keys() == described.keys()
    assert moved == [made.data_ptr()]
