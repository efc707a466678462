"""Update rules of others by themselves: what they describe, what they take back, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from mindspeed_core import CheckpointError, DescribedOptimizer, SessionError, UserError, put_inside
from mindspeed_core.runtime.instance_patches import Instances
from mindspeed_megatron import optimizer_state
from mindspeed_megatron.saved_schedule import group_values


class Momentum(DescribedOptimizer):
    def __init__(self, groups, decay=0.5):
        super().__init__(groups, {"decay": decay})

    def new_state(self, parameter):
        return {"exp_avg": torch.zeros_like(parameter)}

    def update(self, parameter, gradient, state, group):
        state["exp_avg"].lerp_(gradient, group["decay"])
        parameter.sub_(state["exp_avg"], alpha=group["lr"])


def groups(*parameters, **more):
    return [{"params": list(parameters), "lr": 1.0, "weight_decay": 0.0, **more}]


def stepped(kind=Momentum, **options):
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = kind(groups(parameter), **options)
    parameter.grad = torch.tensor([1.0, -2.0])
    optimizer.step()
    return parameter, optimizer


def test_a_parameter_is_updated_and_steps_are_counted():
    parameter, optimizer = stepped()
    assert parameter.tolist() == [-0.5, 1.0]
    assert optimizer.param_groups[0]["step"] == 1
    parameter.grad = None
    optimizer.step()
    assert parameter.tolist() == [-0.5, 1.0]
    assert optimizer.param_groups[0]["step"] == 2


def test_a_view_that_requires_grad_is_a_parameter():
    whole = torch.nn.Parameter(torch.zeros(4))
    part = whole.view(-1)[1:3]
    optimizer = Momentum(groups(part))
    part.grad = torch.ones(2)
    optimizer.step()
    assert whole.tolist() == [0.0, -0.5, -0.5, 0.0]


def test_adam_reads_what_it_saves():
    _, optimizer = stepped()
    saved = optimizer.state_dict()
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    adam.load_state_dict(saved)
    (state,) = adam.state.values()
    assert state["exp_avg"].tolist() == [0.5, -1.0]
    assert state["exp_avg_sq"].tolist() == [0.0, 0.0]
    assert state["step"] == 1


def test_it_reads_what_adam_saved():
    weight = torch.nn.Parameter(torch.zeros(2))
    adam = torch.optim.AdamW([weight], betas=(0.5, 0.5))
    weight.grad = torch.tensor([2.0, 4.0])
    adam.step()
    optimizer = Momentum(groups(torch.nn.Parameter(torch.zeros(2))))
    optimizer.load_state_dict(adam.state_dict())
    assert optimizer.state_dict()["state"][0]["exp_avg"].tolist() == [1.0, 2.0]
    assert optimizer.param_groups[0]["step"] == 1


def test_its_own_hyperparameters_are_those_of_the_run():
    saved = stepped(decay=0.25)[1].state_dict()
    saved["param_groups"][0]["lr"] = 3.0
    optimizer = Momentum(groups(torch.nn.Parameter(torch.zeros(2)), decay=0.125), decay=0.75)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["decay"] == 0.75
    assert optimizer.param_groups[0]["lr"] == 3.0


class Counting(Momentum):
    counts = ("halvings",)

    def step(self, closure=None):
        super().step()
        self.param_groups[0]["halvings"] += 1


def test_what_a_rule_counts_goes_on_and_begins_at_zero_where_nobody_counted():
    saved = stepped(Counting)[1].state_dict()
    assert saved["param_groups"][0]["halvings"] == 1
    optimizer = Counting(groups(torch.nn.Parameter(torch.zeros(2))))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["halvings"] == 1
    optimizer.load_state_dict(stepped()[1].state_dict())
    assert optimizer.param_groups[0]["halvings"] == 0


def test_what_a_rule_counts_is_no_constant_that_a_schedule_decides():
    inner = stepped(Counting)[1]
    whole = SimpleNamespace(param_groups=inner.param_groups, optimizer=inner)
    assert all("halvings" not in values and "decay" in values for values in group_values(whole))


def test_what_is_saved_does_not_change_with_the_next_update_of_a_copy():
    parameter, optimizer = stepped()
    other = Momentum(groups(torch.nn.Parameter(torch.zeros(2))))
    other.load_state_dict(optimizer.state_dict())
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert other.state_dict()["state"][0]["exp_avg"].tolist() == [0.5, -1.0]


class Misnamed(Momentum):
    def describe(self, parameter, state):
        return {"momentum": state["exp_avg"]}


class Misshaped(Momentum):
    def describe(self, parameter, state):
        return {"exp_avg": state["exp_avg"].view(1, -1)}


class Forgetful(Momentum):
    further = ("average",)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Misnamed, "Misnamed: checkpoints know no momentum"),
        (Misshaped, r"Misshaped.describe: exp_avg is \[1, 2\], its parameter \[2\]"),
        (Forgetful, "Forgetful.describe leaves out average"),
    ],
)
def test_a_wrong_description_is_an_error_when_saving(kind, said):
    with pytest.raises(TypeError, match=said):
        stepped(kind)[1].state_dict()


def test_names_with_another_meaning_are_refused():
    with pytest.raises(TypeError, match=r"Clashing\.further: step have another meaning"):
        type("Clashing", (Momentum,), {"further": ("step",)})(groups(torch.zeros(1)))


def hosting(kind=FP32Optimizer, inner=None, **config):
    part = object.__new__(kind)
    part.is_stub_optimizer = False
    part.init_state_fn = None
    part.config = SimpleNamespace(**config)
    part.optimizer = inner or torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))])
    part.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    return part


def test_the_former_optimizer_is_back_when_the_session_closes():
    session, part = SimpleNamespace(instances=Instances()), hosting()
    former = part.optimizer
    (inner,) = put_inside(session, part, Momentum, owner="acme")
    assert part.optimizer is inner
    assert inner.param_groups[0] is former.param_groups[0]
    assert [change.owner for change in session.instances.listing()] == ["acme", "acme"]
    session.instances.revert()
    assert part.optimizer is former


def test_a_rank_that_trains_nothing_is_left_alone():
    part = hosting()
    part.is_stub_optimizer = True
    assert put_inside(SimpleNamespace(instances=Instances()), part, Momentum, owner="acme") == []


@pytest.mark.parametrize(
    ("part", "error", "said"),
    [
        (hosting(use_precision_aware_optimizer=True), UserError, "drop --use-precision-aware-optimizer"),
        (hosting(optimizer_cpu_offload=True), UserError, "drop --optimizer-cpu-offload"),
        (SimpleNamespace(optimizer=None), UserError, "put inside a SimpleNamespace"),
        (hosting(inner=stepped()[1]), SessionError, "has state"),
    ],
)
def test_where_no_other_optimizer_works_is_refused(part, error, said):
    with pytest.raises(error, match=f"acme: .*{said}"):
        put_inside(SimpleNamespace(instances=Instances()), part, Momentum, owner="acme")


def test_a_class_that_describes_nothing_is_named_when_the_distributed_optimizer_is_saved():
    part = hosting(DistributedOptimizer, torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0))
    with pytest.raises(CheckpointError, match=r"the state of SGD; derive it from .*DescribedOptimizer"):
        optimizer_state.sharded_state(SimpleNamespace(chained_optimizers=[part]), {}, {}, is_loading=False)
