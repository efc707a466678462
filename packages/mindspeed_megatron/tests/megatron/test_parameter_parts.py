"""An update rule is told where its tensors lie in the parameters of the model, on every rank."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from short_runs import EP2, MOE, PP2, SHARDED, TP2, step, training
from torch.distributed.tensor import DTensor

from mindspeed_core import DescribedOptimizer, put_inside
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.fully_sharded.megatron_fsdp import has_known_faults
from mindspeed_megatron.parameter_parts import ParameterParts, _Shares
from mindspeed_megatron.unwrap import unwrap
from mindspeed_testing import run_world

FSDP = (*SHARDED, "--use-megatron-fsdp", "--data-parallel-sharding-strategy")
UNTIED = "--untie-embeddings-and-output-weights"
LAYOUTS = {
    "float32": (),
    "float16 copies": ("--bf16",),
    "distributed optimizer": (*SHARDED, "--bf16", "--ddp-bucket-size", "20000", "--overlap-grad-reduce"),
    "experts": (*SHARDED, *EP2, *MOE),
    "tensor parallelism": (*TP2, *SHARDED),
    "pipeline": (*PP2, *SHARDED),
    "fsdp2": ("--use-torch-fsdp2", UNTIED),
}
if has_known_faults():
    LAYOUTS["megatron-fsdp"] = (*FSDP, "optim_grads_params", UNTIED)
    LAYOUTS["megatron-fsdp, unsharded"] = (*FSDP, "no_shard")


class Momentum(DescribedOptimizer):
    """Remembers which parts it was told of."""

    def __init__(self, groups):
        super().__init__(groups)
        self.told = {}

    def new_state(self, parameter):
        self.told["new"] = self.part_of(parameter)
        return {"exp_avg": torch.zeros_like(parameter)}

    def update(self, parameter, gradient, state, group):
        self.told["update"] = self.part_of(parameter)
        parameter.sub_(gradient, alpha=group["lr"])


class Probe:
    def __init__(self):
        self.found = []

    @hookimpl(wrapper=True)
    def build_optimizer(self, session, model, pg):
        optimizer = yield
        self.found = put_inside(session, optimizer, Momentum, owner="probe", model=model, pg=pg)
        return optimizer


def looked_at(names):
    """Return mistakes in the parts of each layout."""
    found = {}
    for name in names:
        probe = Probe()
        with training(*LAYOUTS[name], probes=(probe,)) as run:
            wrong, kinds = [], set()
            for inner in probe.found:
                wrong += problems(inner, run)
                kinds |= {(part.tensor_parallel_dim, part.expert) for part in inner.parts.every}
            step(run)
            told = {kind for inner in probe.found for kind, part in inner.told.items() if part.name}
            found[name] = (wrong, kinds, told)
    return found


def problems(inner, run):
    names = {}
    for chunk in run.model:
        names |= dict(unwrap(chunk).named_parameters())
    for group in inner.param_groups:
        for parameter in group["params"]:
            part, own = inner.part_of(parameter), inner.local_part(parameter)
            if part.stop - part.start != own.numel():
                yield f"{part.name}: {part.start}, {part.stop} of {own.numel()}"
            if names.get(part.name) is not part.parameter:
                yield f"{part.name}: another parameter has this name"
            whole = part.parameter
            if isinstance(whole, DTensor):
                if run.args.use_megatron_fsdp:
                    continue
                whole = whole.full_tensor()
            if not torch.equal(whole.detach().reshape(-1)[part.start : part.stop].float(), own.reshape(-1)):
                yield f"{part.name}: other numbers"
    for part in inner.parts.every:
        holding = inner.held(part.parameter)
        ranks = 1 if holding.group is None else holding.group.size()
        mine = (part.start, part.stop)
        told = [None] * ranks
        if holding.group is None:
            told = [mine]
        else:
            dist.all_gather_object(told, mine, group=holding.group)
        if [tuple(pair) for pair in holding.ranges] != told:
            yield f"{part.name}: {list(holding.ranges)} are {told}"
        if sum(stop - start for start, stop in told) != part.shape.numel():
            yield f"{part.name}: {told} is not the whole"


@pytest.fixture(scope="module")
def found():
    return run_world(f"{__name__}:looked_at", 2, list(LAYOUTS), timeout=200)


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_and_holders_are_those_of_the_model(found, name):
    assert [rank[name][0] for rank in found] == [[], []]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rule_finds_the_part_of_what_it_is_given(found, name):
    assert all(rank[name][2] == {"new", "update"} for rank in found)


def test_tensor_parallel_dimensions_and_experts_are_told(found):
    assert found[0]["tensor parallelism"][1] == {(None, False), (0, False), (1, False)}
    assert {expert for _, expert in found[0]["experts"][1]} == {False, True}


@given(
    size=st.integers(0, 50),
    begin=st.integers(0, 60),
    ranks=st.integers(1, 6),
    share=st.integers(1, 30),
)
def test_shares_are_the_parameter_in_pieces(size, begin, ranks, share):
    # What lies behind the last share is in no bucket.
    size = max(0, min(size, ranks * share - begin))
    pieces = list(_Shares(size, begin, share, ranks))
    assert [i for start, stop in pieces for i in range(start, stop)] == list(range(size))
    assert _Shares(size, begin, share, ranks)[:] == tuple(pieces)


def test_without_megatron_core_every_tensor_is_itself():
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    part = ParameterParts().of(parameter)
    assert (part.parameter, part.start, part.stop, part.shape) == (None, 0, 6, (3, 2))
    assert ParameterParts().held(parameter).ranges == ((0, 6),)


def test_a_tensor_that_is_none_of_the_optimizers_is_an_error():
    known, other = torch.zeros(2), torch.zeros(2)
    parts = ParameterParts({known: ParameterParts().of(known)})
    with pytest.raises(TypeError, match=r"a tensor of \[2\] is none that the optimizer updates"):
        parts.of(other)
