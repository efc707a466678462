"""Parameters that the next forward pass would gather are complete where somebody reads them before."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from short_runs import BUCKETS, EP2, MOE, OVERLAP, PP2, distance, one_process, parameters, step, training

from mindspeed_core.errors import SessionError
from mindspeed_core.feature import hookimpl
from mindspeed_core.megatron.fully_sharded.parts import rows_held
from mindspeed_core.megatron.parameter_gather import complete_parameters, wait_for_parameters
from mindspeed_core.megatron.unwrap import unwrap
from mindspeed_core.testing import run_world
from mindspeed_core.testing.communication import count_communication

EXPERTS = (*MOE, "--num-layers", "2")
INTERLEAVED = (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")


class Average:
    """A moving average of this rank's parameters, taken right after each update."""

    def __init__(self, stage="optimizer_step", *, complete=True):
        self.kept, self.stage, self.complete = {}, stage, complete

    @hookimpl(wrapper=True)
    def optimizer_step(self, run):
        result = yield
        self.take("optimizer_step", run)
        return result

    @hookimpl(wrapper=True)
    def train_step(self, run):
        result = yield
        self.take("train_step", run)
        return result

    @torch.no_grad()
    def take(self, stage, run):
        if stage != self.stage:
            return
        if self.complete:
            run.complete_parameters()
        for index, chunk in enumerate(run.model):
            for name, parameter in unwrap(chunk).named_parameters():
                value = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                self.kept[index, name] = self.kept.get((index, name), 0.0) + value.detach().clone()


def averaged(initial, *flags, **options):
    """The average, the weights and the losses after three steps, and the gathers of the third."""
    probe = Average(**options)
    with training(*flags, initial=initial, probes=(probe,)) as run, warnings.catch_warnings():
        warnings.filterwarnings("error", message="The next bucket's parameter all-gather")
        losses = [step(run).losses["lm loss"] for _ in range(2)]
        with count_communication() as log:
            losses.append(step(run).losses["lm loss"])
        gathers = sum("all_gather" in call.operation for call in log.calls)
        return probe.kept, parameters(run).tensors, losses, gathers


def data_parallel(dense, experts):
    return {
        "plain": averaged(dense, *BUCKETS),
        "stale": averaged(dense, *OVERLAP, complete=False),
        "complete": averaged(dense, *OVERLAP),
        "after the step": averaged(dense, *OVERLAP, stage="train_step"),
        "experts": averaged(experts, *BUCKETS, *EP2, *EXPERTS),
        "experts, complete": averaged(experts, *OVERLAP, *EP2, *EXPERTS),
        "experts of both": averaged(experts, *OVERLAP, *EXPERTS),
    }


def alone():
    dense, experts = one_process(), one_process(*EXPERTS)
    return dense, experts, averaged(dense), averaged(experts, *EXPERTS)


@pytest.fixture(scope="module")
def single():
    return run_world(alone, 1)[0]


@pytest.fixture(scope="module")
def two_ranks(single):
    return run_world(data_parallel, 2, *single[:2])


def test_an_average_taken_after_the_update_is_that_of_one_process(single, two_ranks):
    for found in two_ranks:
        assert distance(found["complete"][0], single[2][0]) < 1e-5
        assert distance(found["experts of both"][0], single[3][0]) < 1e-5


def test_without_the_call_it_is_stale(two_ranks):
    for found in two_ranks:
        assert distance(found["stale"][0], found["complete"][0]) > 1e-3


@pytest.mark.parametrize("name", ["complete", "after the step"])
def test_it_is_to_the_bit_that_of_a_training_without_the_overlap(two_ranks, name):
    for found in two_ranks:
        assert distance(found[name][0], found["plain"][0]) == 0.0


def test_experts_of_their_own_data_parallel_ranks_are_complete(two_ranks):
    for found in two_ranks:
        assert distance(found["experts, complete"][0], found["experts"][0]) == 0.0


@pytest.mark.parametrize("name", ["stale", "complete", "after the step"])
def test_the_training_is_the_same_to_the_bit_with_and_without_the_call(two_ranks, name):
    for found in two_ranks:
        assert found[name][2] == found["plain"][2]
        assert distance(found[name][1], found["plain"][1]) == 0.0


def test_what_was_gathered_by_the_call_is_not_gathered_again(two_ranks):
    for found in two_ranks:
        assert found["complete"][3] == found["stale"][3] > 0
        assert found["plain"][3] > 0


def interleaved(initial):
    layouts = {"plain": BUCKETS, "aligned": OVERLAP, "free": (*OVERLAP, "--no-align-param-gather")}
    found = {name: averaged(initial, *INTERLEAVED, *flags) for name, flags in layouts.items()}
    return {**found, "stale": averaged(initial, *INTERLEAVED, *OVERLAP, complete=False)}


@pytest.fixture(scope="module")
def interleaved_ranks(single):
    return run_world(interleaved, 4, single[0])


@pytest.mark.parametrize("name", ["aligned", "free"])
def test_interleaved_chunks_are_complete(interleaved_ranks, name):
    for found in interleaved_ranks:
        assert distance(found[name][0], found["plain"][0]) == 0.0
        assert distance(found["stale"][0], found["plain"][0]) > 1e-4


@pytest.mark.parametrize("name", ["aligned", "free", "stale"])
def test_interleaved_chunks_train_the_same_to_the_bit(interleaved_ranks, name):
    for found in interleaved_ranks:
        assert found[name][2] == found["plain"][2]
        assert distance(found[name][1], found["plain"][1]) == 0.0
