"""The engine of saved tensors: what it puts away, who owns it, and that gradients stay as they are."""

import gc

import pytest
import torch
from torch import nn

from mindspeed_core.errors import UserError
from mindspeed_core.platforms.cpu import CpuPlatform
from mindspeed_memory.saved.engine import SavedTensors
from mindspeed_memory.saved.host_copy import HostCopies

WIDTH, LAYERS = 16, 4
BYTES = 8 * WIDTH * 4


class Model(nn.Module):
    """Layers of a product, tanh (which saves its result) and a product whose views are saved."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Swapped:
    """The model with an engine around its layers."""

    def __init__(self, *, depth=1, min_bytes=1, limit=None):
        self.model = Model()
        self.copies = HostCopies(CpuPlatform(), limit)
        self.engine = SavedTensors(self.copies, min_bytes=min_bytes, depth=depth)
        self.engine.keep(self.model.parameters())
        for layer in self.model.layers:
            layer.forward = self.engine.scope(layer.forward)

    def forward(self, x):
        self.engine.begin()
        loss = self.model(x)
        self.engine.end(loss)
        return loss

    @property
    def used(self):
        gc.collect()
        return self.copies.pool.used


def inputs(seed=0):
    torch.manual_seed(seed)
    return torch.randn(8, WIDTH, requires_grad=True)


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_gradients_are_those_without_it(depth):
    plain, swapped = Model(), Swapped(depth=depth)
    x, y = inputs(), inputs()
    plain(x).backward()
    swapped.forward(y).backward()
    assert x.grad.equal(y.grad)
    for ours, theirs in zip(gradients(swapped.model), gradients(plain)):
        assert ours.equal(theirs)


def test_each_storage_goes_once_and_only_what_modules_made():
    swapped = Swapped()
    loss = swapped.forward(inputs())
    # Results of products are not saved; those of tanh are, by tanh and by the next product.
    assert swapped.used == LAYERS * BYTES
    loss.backward()
    assert swapped.used == 0


def test_what_comes_back_early_is_not_late():
    late = {}
    for depth in (0, 1):
        swapped = Swapped(depth=depth)
        swapped.forward(inputs()).backward()
        late[depth] = swapped.engine.late
    assert late == {0: LAYERS, 1: 0}


def test_nothing_comes_back_before_backward_reaches_the_module_that_begins_it():
    swapped, stored, at_the_loss = Swapped(), [], []
    last = swapped.model.layers[-1]
    last.forward = swapped.engine.before(nn.Sequential.forward.__get__(last))

    def kept(flat):
        stored.append(swapped.copies(flat))
        return stored[-1]

    swapped.engine._codec = kept
    swapped.engine.begin()
    loss = swapped.model(inputs()) * 1.0
    loss.register_hook(lambda gradient: at_the_loss.append([one.is_on_device for one in stored[:-1]]))
    swapped.engine.end(loss)
    loss.backward()
    assert at_the_loss == [[False] * (LAYERS - 2)]
    assert swapped.engine.late == 0


def test_two_micro_batches_under_way_keep_theirs_apart():
    swapped, plain = Swapped(), Model()
    losses = [swapped.forward(inputs(seed)) for seed in (1, 2)]
    assert swapped.used == 2 * LAYERS * BYTES
    for loss in losses:
        loss.backward()
    for seed in (1, 2):
        plain(inputs(seed)).backward()
    assert swapped.used == 0
    for ours, theirs in zip(gradients(swapped.model), gradients(plain)):
        assert ours.equal(theirs)


def test_a_graph_that_is_dropped_gives_its_buffers_back():
    swapped = Swapped()
    loss = swapped.forward(inputs())
    del loss
    assert swapped.used == 0


def test_a_backward_pass_that_fails_gives_its_buffers_back():
    swapped = Swapped()
    x = inputs()
    x.register_hook(lambda gradient: (_ for _ in ()).throw(ValueError("stop")))
    loss = swapped.forward(x)
    with pytest.raises(ValueError, match="stop"):
        loss.backward()
    del loss
    assert swapped.used == 0


def test_a_graph_that_is_kept_goes_backward_twice():
    swapped = Swapped()
    loss = swapped.forward(inputs())
    loss.backward(retain_graph=True)
    once = gradients(swapped.model)
    loss.backward()
    for both, one in zip(gradients(swapped.model), once):
        assert both.equal(2 * one)


def test_buffers_are_made_once():
    swapped = Swapped()
    for _ in range(3):
        swapped.forward(inputs()).backward()
        assert swapped.used == 0
    assert swapped.copies.pool.made == LAYERS


def test_small_storages_and_evaluation_stay():
    swapped = Swapped(min_bytes=BYTES + 1)
    loss = swapped.forward(inputs())
    assert swapped.used == 0
    loss.backward()
    swapped = Swapped()
    with torch.no_grad():
        swapped.forward(inputs())
    assert swapped.copies.pool.made == 0


def test_views_of_one_storage_come_back_from_one_copy():
    copies = HostCopies(CpuPlatform())
    engine = SavedTensors(copies, min_bytes=1)

    def product(x):
        both = x * 1.0
        left, right = both.chunk(2, dim=1)
        return (left * right).sum()

    x, y = inputs(), inputs()
    product(x).backward()
    engine.begin()
    loss = engine.scope(product)(y)
    engine.end(loss)
    assert copies.pool.used == BYTES
    loss.backward()
    assert x.grad.equal(y.grad)


def test_what_changed_in_between_is_saved_as_it_was_each_time():
    """A storage is overwritten between two modules that save it, which autograd would refuse."""
    engine = SavedTensors(HostCopies(CpuPlatform()), min_bytes=1)
    times = engine.scope(torch.mul)
    engine.begin()
    weight, x = inputs(1), inputs()
    kept = x * 1.0
    first = times(kept, weight)
    with torch.no_grad():
        kept.mul_(2)
    second = times(kept, weight)
    engine.end(None)
    (first + second).sum().backward()
    assert weight.grad.equal(3 * x.detach())


def test_what_is_computed_again_in_backward_is_not_put_away():
    from torch.utils.checkpoint import checkpoint

    swapped = Swapped()
    swapped.engine.begin()
    loss = checkpoint(swapped.model, inputs(), use_reentrant=True)
    loss.backward()
    assert swapped.copies.pool.made == 0


def test_a_limit_of_the_host_is_kept_with_a_message():
    swapped = Swapped(limit=2 * BYTES / 2**30)
    with pytest.raises(UserError, match=r"--swap-host-limit-gb .* raise it, swap fewer layers"):
        swapped.forward(inputs())
