"""A session completes the parameters of a model that the caller wrapped, wherever it knows the wrapper."""

from typing import NamedTuple

import pytest
import torch
from library_features import parallel, registry, small
from megatron.core import tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from mindspeed_core.activation import activate
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.feature_state import like_parameters
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_megatron.gradient_norm import gradient_norm
from mindspeed_testing import run_world


class Weighed:
    """Sums up the updated parameters of the caller's model, in two stages."""

    def __init__(self, *, complete):
        self.complete, self.sums, self.model, self.norms = complete, [], None, []

    def weigh(self, run):
        if self.complete:
            run.complete_parameters()
        values = [parameter.detach().double().square().sum() for parameter in self.model.parameters()]
        self.sums.append(float(sum(values)))

    @hookimpl(wrapper=True)
    def optimizer_step(self, run):
        norm = float(gradient_norm(run)) if run.model else None
        result = yield
        self.norms.append((norm, result.grad_norm))
        self.weigh(run)
        return result

    @hookimpl
    def checkpoint_state(self, run):
        kept = {parameter: parameter.detach().clone() for parameter in self.model.parameters()}
        return {"weighed": like_parameters(run, kept)}

    @hookimpl(wrapper=True)
    def before_save_checkpoint(self, run):
        self.weigh(run)
        return (yield)


class Trained(NamedTuple):
    """Results of a loop of one's own."""

    sums: list
    norms: list
    described: int
    parameters: int


def trained(passed, *, overlap, complete=True):
    parallel()
    probe = Weighed(complete=complete)
    config = small()
    with activate(
        [], platform="cpu", registry=registry(), extra_plugins=[probe], configs=[config]
    ) as session:
        tensor_parallel.model_parallel_cuda_manual_seed(3)
        torch.manual_seed(3)
        config = session.config(config)
        model = session.model(
            GPTModel(config, session.layer_spec(config), 64, 16, position_embedding_type="rope")
        )
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_param_gather=overlap,
            overlap_grad_reduce=True,
            bucket_size=5000,
        )
        wrapped = DistributedDataParallel(config, options, model)
        probe.model = model
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1e-2, use_distributed_optimizer=True, overlap_param_gather=overlap
            ),
            [wrapped],
        )
        chunks = {"by the optimizer": None, "wrapped": [wrapped]}[passed]
        optimizer = session.wrap_optimizer(optimizer, chunks)
        rank = torch.distributed.get_rank()
        tokens = (torch.arange(32).reshape(2, 16) * (rank + 1)) % 64
        for _ in range(3):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            wrapped(tokens, torch.arange(16).expand(2, 16), None, labels=tokens.roll(-1, 1)).mean().backward()
            finalize_model_grads([wrapped])
            optimizer.step()
        probe.complete = False
        with session.saving():
            described = len(session.state_dict()["weighed"]) if chunks else 0
        found = Trained(probe.sums, probe.norms, described, len(list(model.parameters())))
    destroy_megatron_state()
    return found


def all_trained():
    return {
        "plain": trained("wrapped", overlap=False),
        "stale": trained("wrapped", overlap=True, complete=False),
        "wrapped": trained("wrapped", overlap=True),
        "by the optimizer": trained("by the optimizer", overlap=True),
    }


@pytest.fixture(scope="module")
def ranks():
    return run_world(all_trained, 2)


@pytest.mark.parametrize("known", ["wrapped", "by the optimizer"])
def test_parameters_are_complete_after_every_update(ranks, known):
    for found in ranks:
        assert found[known].sums == found["plain"].sums
        assert found["stale"].sums[:3] != found["plain"].sums[:3]


def test_parameters_are_complete_while_saving(ranks):
    for found in ranks:
        assert found["stale"].sums[3] == found["plain"].sums[3] == found["plain"].sums[2]


@pytest.mark.parametrize("name", ["plain", "wrapped"])
def test_the_norm_of_gradients_is_that_of_megatron_core(ranks, name):
    for found in ranks:
        for ours, theirs in found[name].norms:
            assert ours == pytest.approx(theirs, rel=1e-6)


def test_state_like_parameters_is_described_for_the_callers_checkpoint(ranks):
    for found in ranks:
        assert found["wrapped"].described == found["wrapped"].parameters > 10
