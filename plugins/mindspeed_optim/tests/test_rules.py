"""The rules by themselves: torch's own Muon and AdamW are what they compute."""

import pytest
import torch

from mindspeed_optim.muon.matrices import Matrices
from mindspeed_optim.muon.options import LION, MuonOptions, coefficients
from mindspeed_optim.rules.cadam import CAdam
from mindspeed_optim.rules.fused_adamw import FusedAdamW
from mindspeed_optim.rules.muon import Muon

SHAPES = ((24, 16), (16, 24), (16,), (3,))
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}


def parameters(shapes=SHAPES):
    numbers = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(*shape, generator=numbers)) for shape in shapes]


def train(optimizer, trained, steps=4):
    numbers = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for parameter in trained:
            parameter.grad = torch.randn(parameter.shape, generator=numbers)
        optimizer.step()
    return [parameter.detach() for parameter in trained]


def groups(trained, **more):
    return [{"params": trained, "lr": 0.02, "weight_decay": 0.1, **ADAM, **more}]


@pytest.mark.parametrize("nesterov", [False, True])
def test_matrices_are_updated_as_by_torchs_muon(nesterov):
    torchs, ours = parameters(SHAPES[:2]), parameters(SHAPES[:2])
    expected = train(
        torch.optim.Muon(torchs, lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov), torchs
    )
    options = MuonOptions(
        momentum=0.9,
        nesterov=nesterov,
        scale_mode="shape_scaling",
        precision="low",
        coefficients=coefficients("simple", 5),
    )
    found = train(Muon(groups(ours), options, Matrices([], options)), ours)
    for one, other in zip(found, expected):
        # Both multiply bfloat16 numbers, which are rounded in other places.
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0)


@pytest.mark.parametrize("decoupled", [False, True])
def test_everything_else_is_updated_as_by_adam(decoupled):
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    torchs, ours = parameters(SHAPES[2:]), parameters(SHAPES[2:])
    expected = train(kind(torchs, lr=0.02, weight_decay=0.1, **ADAM), torchs)
    options = MuonOptions()
    found = train(Muon(groups(ours), options, Matrices([], options), decoupled=decoupled), ours)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_or_as_by_lion():
    options = MuonOptions(scalar=LION, lion_betas=(0.9, 0.99))
    (ours,) = parameters(SHAPES[3:])
    optimizer = Muon(groups([ours]), options, Matrices([], options))
    momentum, expected, numbers = torch.zeros(3), ours.detach().clone(), torch.Generator().manual_seed(2)
    for _ in range(4):
        gradient = torch.randn(3, generator=numbers)
        expected = expected * (1 - 0.02 * 0.1) - 0.02 * torch.sign(momentum * 0.9 + gradient * 0.1)
        momentum = momentum * 0.99 + gradient * 0.01
    torch.testing.assert_close(train(optimizer, [ours])[0], expected)
    assert optimizer.state_of(ours).keys() == {"exp_avg"}


def test_a_matrix_keeps_one_moment():
    options = MuonOptions()
    trained = parameters()
    optimizer = Muon(groups(trained), options, Matrices([], options))
    assert [set(optimizer.state_of(p)) for p in trained[::2]] == [{"exp_avg"}, {"exp_avg", "exp_avg_sq"}]
    assert not optimizer.described(trained[0])["exp_avg_sq"].any()


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_fused_rule_is_adam(decoupled):
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    torchs, ours = parameters(), parameters()
    expected = train(kind(torchs, lr=0.02, weight_decay=0.1, **ADAM), torchs, steps=20)
    found = train(FusedAdamW(groups(ours), decoupled=decoupled), ours, steps=20)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_a_group_is_one_launch(monkeypatch):
    launches, kernel = [], torch._fused_adamw_
    monkeypatch.setattr(
        torch,
        "_fused_adamw_",
        lambda *lists, **more: launches.append(len(lists[0])) or kernel(*lists, **more),
    )
    trained = parameters()
    optimizer = FusedAdamW([*groups(trained[:3]), *groups(trained[3:])])
    train(optimizer, trained, steps=1)
    assert launches == [3, 1]


def test_what_has_no_gradient_stays_and_is_no_launch(monkeypatch):
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *a, **n: pytest.fail("launched"))
    (trained,) = parameters(SHAPES[:1])
    optimizer = FusedAdamW(groups([trained]))
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1


def test_adam_goes_on_from_the_fused_rule_and_back():
    torchs, ours = parameters(), parameters()
    adam, fused = torch.optim.AdamW(torchs, lr=0.02, weight_decay=0.1, **ADAM), FusedAdamW(groups(ours))
    train(adam, torchs)
    train(fused, ours)
    swapped_adam = torch.optim.AdamW(ours, lr=0.02, weight_decay=0.1, **ADAM)
    swapped_adam.load_state_dict(fused.state_dict())
    swapped_fused = FusedAdamW(groups(torchs))
    swapped_fused.load_state_dict(adam.state_dict())
    for one, other in zip(train(swapped_adam, ours), train(swapped_fused, torchs)):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_what_a_save_makes_of_a_state_leaves_the_device(monkeypatch):
    moved, to_host = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moved.append(self.numel()) or to_host(self))
    FusedAdamW(groups([torch.zeros(300)])).state_dict()
    assert moved == []
    # The moment, and the second one that is saved as zeros.
    CAdam(groups([torch.zeros(300)])).state_dict()
    assert moved == [300, 300]
