"""The platform of dry runs: its position in the world, known numbers, experts, and what it refuses."""

from __future__ import annotations

import weakref
from argparse import Namespace
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_core.platforms.platform import Position
from mindspeed_core.platforms.selection import check_dry_run_flags, choose_platform, requested_platform
from mindspeed_core.registry import Registry
from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_megatron.fake.answers import UnknownNumber
from mindspeed_megatron.fake.balanced import balanced_map
from mindspeed_megatron.fake.platform import FakePlatform, fake_position
from mindspeed_megatron.fake.stages import told_shapes
from mindspeed_megatron.fake.tensors import (
    AnsweringMode,
    ShapesOnly,
    UnusableDevice,
    reading_patches,
    shapes_only,
)
from mindspeed_megatron.fake.world import keeping_its_tensor, world_patches


def flags(**given):
    return Namespace(**{"fake_world_size": None, "fake_rank": None, "plan_skew": None, **given})


@contextmanager
def without_values():
    mode, answering, ledger = ShapesOnly(), AnsweringMode(), PatchLedger()
    ledger.apply(reading_patches(answering.answers), owner="test")
    try:
        with shapes_only(mode, answering):
            yield answering.answers
    finally:
        ledger.revert()


def test_the_position_is_that_of_the_flags():
    assert fake_position(flags(fake_world_size=16, fake_rank=5), {}) == (5, 16, 0)


def test_without_flags_the_position_is_that_of_the_launcher():
    assert fake_position(flags(), {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3"}) == (3, 8, 0)


def test_a_flag_that_contradicts_the_launcher_is_refused():
    with pytest.raises(ArgumentError, match="--fake-world-size 4: the launcher says WORLD_SIZE=8"):
        fake_position(flags(fake_world_size=4), {"WORLD_SIZE": "8"})


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_of_the_world_is_refused(rank):
    with pytest.raises(ArgumentError, match=r"--fake-rank .* outside of a world of 4 ranks"):
        fake_position(flags(fake_world_size=4, fake_rank=rank), {})


def test_auto_never_chooses_a_dry_run():
    name, _ = choose_platform("auto", Registry.discover())

    assert not Registry.discover().platform(name).dry_run


@pytest.mark.parametrize(
    ("asked", "chosen"), [("auto", "fake"), ("cpu", "fake"), ("cuda", "fake-cuda"), ("npu", "fake-npu")]
)
def test_a_fake_process_group_makes_a_dry_run_of_the_platform(asked, chosen):
    assert requested_platform(Namespace(platform=asked, fake_process_group=True)) == chosen


def test_a_platform_without_a_dry_run_is_refused():
    with pytest.raises(ArgumentError, match="no dry run of --platform acme"):
        requested_platform(Namespace(platform="acme", fake_process_group=True))


def test_flags_of_dry_runs_are_refused_where_numbers_are_computed():
    with pytest.raises(ArgumentError, match="--fake-rank 1: belongs to dry runs, and --platform is cpu"):
        check_dry_run_flags(Registry.discover().platform("cpu"), flags(fake_rank=1))


def test_a_skew_is_positive():
    with pytest.raises(ArgumentError, match="--plan-skew 0"):
        FakePlatform().check_arguments(flags(plan_skew=0.0))


def test_parts_of_parameters_that_are_checked_by_values_are_refused():
    with pytest.raises(ArgumentError, match="--use-megatron-fsdp: a dry run has no values"):
        FakePlatform().check_arguments(flags(use_megatron_fsdp=True))


def test_fake_npu_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("MINDSPEED_NPU_STUB_DEVICES", raising=False)

    with pytest.raises(UserError, match="--platform fake"):
        choose_platform("fake-npu", Registry.discover())


def test_a_world_starts_without_its_peers_where_its_function_was_wrapped_before(monkeypatch):
    # As torch_npu's transfer of cuda names wraps it, for good.
    original = dist.init_process_group
    wrapped = lambda *args, **options: original(*args, **options)  # noqa: E731
    monkeypatch.setattr(dist, "init_process_group", wrapped)
    ledger = PatchLedger()
    ledger.apply(world_patches(Position(3, 8, 0)), owner="test")
    try:
        dist.init_process_group("gloo")
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        ledger.revert()

    assert dist.init_process_group is wrapped


def test_a_transfer_keeps_its_tensor_as_long_as_somebody_keeps_it():
    transfer = keeping_its_tensor(lambda tensor, peer: SimpleNamespace(wait=lambda: peer))
    tensor = torch.zeros(2)
    alive = weakref.ref(tensor)

    work = transfer(tensor, 1)
    del tensor
    assert work.wait() == 1
    assert alive() is not None
    del work
    assert alive() is None


def test_integers_that_follow_from_known_ones_are_known():
    with without_values():
        counts = torch.arange(4, dtype=torch.int64) * 2
        found = counts.tolist(), int(counts.sum()), counts[1:3].tolist()

    assert found == ([0, 2, 4, 6], 12, [2, 4])


@pytest.mark.parametrize(
    ("sent", "received", "arrived"), [((1, 2), (2, 2), [5, 6, 5, 6]), ((1, 2), (1, 3), None)]
)
def test_every_rank_is_taken_to_send_what_this_one_sends(sent, received, arrived):
    ledger = PatchLedger()
    ledger.apply(world_patches(Position(1, 2, 0)), owner="test")
    try:
        dist.init_process_group("gloo")
        with without_values():
            output = torch.empty(4, dtype=torch.int64)
            dist.all_to_all_single(output, torch.tensor([4, 5, 6]), list(received), list(sent))
            if arrived is None:
                with pytest.raises(UnknownNumber):
                    output.tolist()
            else:
                assert output.tolist() == arrived
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        ledger.revert()


@pytest.mark.parametrize("known", [(16, 2, 8), None])
def test_a_stage_is_told_the_shape_that_is_known_and_no_other(known, monkeypatch):
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    mode, answering, ledger = ShapesOnly(), AnsweringMode(), PatchLedger()
    told = told_shapes(answering, lambda: known)
    ledger.apply([*world_patches(Position(0, 2, 0)), *reading_patches(answering.answers), told], owner="test")
    try:
        dist.init_process_group("gloo")
        with shapes_only(mode, answering):
            config = SimpleNamespace(use_ring_exchange_p2p=False, virtual_pipeline_model_parallel_size=2)
            stage = P2PCommunicator(dist.group.WORLD, config)
            sent = torch.empty(16, 2, 8)
            with pytest.raises(UnknownNumber) if known is None else nullcontext():
                assert stage._communicate_shapes(sent, None, True, False) == ([16, 2, 8], [0, 0, 0])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        ledger.revert()


def test_a_seed_is_known_and_an_integer_that_may_decide_a_shape_is_not():
    with without_values():
        assert int(torch.randint(1 << 52, ())) == 0
        with pytest.raises(UnknownNumber):
            int(torch.randint(1 << 16, ()))


def test_gradients_are_taken_to_be_finite_whatever_ranks_are_reduced():
    ledger = PatchLedger()
    ledger.apply(world_patches(Position(1, 2, 0)), owner="test")
    try:
        dist.init_process_group("gloo")
        with without_values() as answers:
            found, gradients = torch.zeros(1), [torch.rand(3)]
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.ones(1))
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            assert found.item() == 0.0
            found.add_(1.0)
            found.item()
        assert [answer.value for answer in answers.counts] == [1.0]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        ledger.revert()


def test_an_unknown_integer_is_refused_with_its_place():
    with (
        without_values(),
        pytest.raises(UnknownNumber, match=r"test_fake_platform.py:\d+ .*reads an integer"),
    ):
        torch.ones(4).argmax().item()


def test_a_selection_by_unknown_values_is_refused_with_its_place():
    with (
        without_values(),
        pytest.raises(UnknownNumber, match=r"test_fake_platform.py:\d+ .*selects by values"),
    ):
        (torch.rand(4) > 0.5).nonzero()


def test_an_integer_that_was_overwritten_is_unknown_in_every_view():
    with without_values():
        counts = torch.zeros(4, dtype=torch.int64)
        counts[:2] = torch.rand(2).argsort()
        with pytest.raises(UnknownNumber):
            counts.tolist()


def test_floating_point_numbers_and_switches_are_answered_and_counted():
    with without_values() as answers:
        value, switch = torch.rand(1).item(), bool(torch.rand(1) > 2)

    assert (value, switch) == (1.0, False)
    assert sorted(answer.value for answer in answers.counts) == [False, 1.0]
    assert all(answer.file.endswith("test_fake_platform.py") for answer in answers.counts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, device="cuda", requires_grad=True),
        lambda: torch.ones(2).to("cuda:0"),
        lambda: torch.empty_like(torch.ones(2), device=torch.device("cuda")),
    ],
    ids=["made", "moved", "alike"],
)
def test_a_tensor_labelled_cuda_is_refused_before_it_aborts_the_process(make, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)

    with without_values(), pytest.raises(UnusableDevice, match=r"test_fake_platform.py:\d+ .*labelled cuda"):
        make()


def test_a_torch_for_cuda_may_label_tensors_cuda(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)

    with without_values():
        assert torch.ones(2, device="cuda").device.type == "cuda"


def test_a_selection_is_as_long_as_its_known_mask():
    with without_values():
        mask = torch.tensor([True, False, True])
        chosen = torch.rand(3).masked_select(mask)

    assert chosen.shape == (2,)


@pytest.mark.parametrize("tokens", [8, 7])
def test_each_token_goes_to_as_many_experts_as_it_should(tokens):
    chosen = balanced_map(tokens, 4, 2, 0, 2, 1.0, tokens)

    assert chosen.sum(dim=1).tolist() == [2] * tokens
    assert max(chosen.sum(dim=0)) - min(chosen.sum(dim=0)) <= 1


def test_a_skew_gives_the_experts_of_this_rank_more_tokens():
    even, skewed = (balanced_map(64, 8, 2, 2, 2, skew, 64).sum(dim=0) for skew in (1.0, 1.5))

    assert even.tolist() == [16] * 8
    assert skewed[2:4].tolist() == [24, 24]
    assert skewed.sum() == 128
