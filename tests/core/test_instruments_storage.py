"""The tracker of storages: kinds, phases, and what was alive at a peak."""

from __future__ import annotations

import torch

from mindspeed_megatron.instruments.held_tensors import OPTIMIZER_STATE, PARAMETERS
from mindspeed_megatron.instruments.storage import StorageTracker, without_numbers


def test_the_peak_names_its_tensors_although_they_are_gone():
    with StorageTracker() as tracker:
        large = torch.zeros(100)
        kept = torch.zeros(10)
        del large
        torch.zeros(5)
        tracker.end_phase()

    (phase,) = tracker.report()
    assert (phase.peak, phase.end) == (440, 40)
    assert [tensor.bytes for tensor in phase.largest] == [400, 40]
    assert phase.largest[0].operation == "aten.zeros.default"
    assert "test_instruments_storage.py:" in phase.largest[0].stack[0]
    del kept


def test_what_tensors_are_for_holds_for_peaks_before_it_was_said():
    with StorageTracker() as tracker:
        weight, state = torch.zeros(8), torch.zeros(4)
        tracker.phase("step")
        torch.zeros(2)
        tracker.mark(PARAMETERS, [weight])
        tracker.mark(OPTIMIZER_STATE, [state])
        tracker.end_phase()

    assert tracker.report()[1].kinds == {PARAMETERS: 32, OPTIMIZER_STATE: 16, "other": 8}


def test_activations_belong_to_the_module_that_made_them():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.ReLU())
    with StorageTracker() as tracker:
        output = model(torch.zeros(2, 4))
        tracker.end_phase()

    assert tracker.report()[0].modules == {"Linear": 32, "ReLU": 32}
    del output


def test_memory_of_the_host_is_counted_apart():
    with StorageTracker() as tracker:
        buffer = torch.zeros(16)
        tracker.mark_host(buffer)

    assert (tracker.alive, tracker.host) == (0, 64)


def test_two_devices_are_counted_apart():
    with StorageTracker("meta") as tracker:
        there = torch.zeros(16, device="meta")
        here = torch.zeros(4)
        counted = tracker.alive, tracker.host
        del there

    assert counted == (64, 16)
    assert (tracker.alive, tracker.host) == (0, 16)
    del here


def test_a_storage_that_is_resized_counts_with_its_size():
    with StorageTracker() as tracker:
        tensor = torch.zeros(16)
        tensor.untyped_storage().resize_(0)
        emptied = tracker.alive
        tensor.untyped_storage().resize_(64)

    assert (emptied, tracker.alive, tracker.peak) == (0, 64, 64)


def test_numbers_of_layers_are_left_out_of_names():
    assert without_numbers("decoder.layers.12.mlp.linear_fc1") == "decoder.layers.*.mlp.linear_fc1"
