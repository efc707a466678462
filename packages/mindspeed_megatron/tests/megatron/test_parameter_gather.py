"""Parameters that the next forward pass would gather are complete where somebody reads them before."""

import warnings
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from packaging.version import Version
from short_runs import (
    BUCKETS,
    EP2,
    MOE,
    OVERLAP,
    PP2,
    SHARDED,
    distance,
    one_process,
    parameters,
    step,
    training,
)

from mindspeed_core.activation import activate
from mindspeed_core.errors import SessionError
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.fully_sharded.parts import rows_held
from mindspeed_megatron.instruments.communication import count_communication
from mindspeed_megatron.parameter_gather import complete_parameters, wait_for_parameters
from mindspeed_megatron.unwrap import unwrap
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

EXPERTS = (*MOE, "--num-layers", "2")
UNTIED = "--untie-embeddings-and-output-weights"
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
                self.kept[index, name] = self.kept.get((index, name), 0.0) + whole(parameter)


def whole(parameter):
    """A parameter, put together from the parts of data-parallel ranks where it is sharded."""
    if not hasattr(parameter, "full_tensor"):
        return parameter.clone()
    if not hasattr(parameter, "orig_param"):
        return parameter.full_tensor()
    first, last = rows_held(parameter)
    found = torch.zeros(parameter.orig_param.shape)
    found[first:last] = parameter._local_tensor
    torch.distributed.all_reduce(found)
    return found


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
    dense, experts, untied = one_process(), one_process(*EXPERTS), one_process(UNTIED)
    return dense, experts, averaged(dense), averaged(experts, *EXPERTS), untied, averaged(untied, UNTIED)


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


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["aligned", "free"])
def test_interleaved_chunks_are_complete(interleaved_ranks, name):
    for found in interleaved_ranks:
        assert distance(found[name][0], found["plain"][0]) == 0.0
        assert distance(found["stale"][0], found["plain"][0]) > 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["aligned", "free", "stale"])
def test_interleaved_chunks_train_the_same_to_the_bit(interleaved_ranks, name):
    for found in interleaved_ranks:
        assert found[name][2] == found["plain"][2]
        assert distance(found[name][1], found["plain"][1]) == 0.0


MEGATRON = (*SHARDED, "--use-megatron-fsdp", "--data-parallel-sharding-strategy")
FULLY_SHARDED = {"torch": ("--use-torch-fsdp2",)}
if Version("0.16") <= Version(version("megatron-core")) < Version("0.18"):
    # Megatron-FSDP's parts are described as 0.16 cuts them, its corrections are those up to 0.17.
    FULLY_SHARDED |= {
        "no_shard": (*MEGATRON, "no_shard"),
        "optim": (*MEGATRON, "optim"),
        "optim_grads": (*MEGATRON, "optim_grads", "--overlap-grad-reduce", "--overlap-param-gather"),
        "optim_grads_params": (
            *MEGATRON,
            "optim_grads_params",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
        ),
    }


def fully_sharded(initial):
    return {name: averaged(initial, UNTIED, *flags) for name, flags in FULLY_SHARDED.items()}


@pytest.fixture(scope="module")
def sharded_ranks(single):
    return run_world(fully_sharded, 2, single[4])


@pytest.mark.parametrize("name", FULLY_SHARDED)
def test_fully_sharded_parameters_are_complete_or_this_ranks_updated_part(single, sharded_ranks, name):
    for found in sharded_ranks:
        assert distance(found[name][0], single[5][0]) < 5e-5
        assert found[name][2] == pytest.approx(single[5][2], rel=1e-5)


class ReadsAhead:
    """The first layer's MLP reads a weight of the last layer, which nobody has called yet."""

    def __init__(self, *, wait):
        self.wait = wait

    @hookimpl(wrapper=True)
    def build_model(self):
        chunks = yield
        first, last = chunks[0].decoder.layers[0].mlp, chunks[0].decoder.layers[-1].mlp
        original = first.forward

        def forward(*args, **named):
            if self.wait:
                wait_for_parameters(last.linear_fc2)
            output, bias = original(*args, **named)
            return output + 10 * last.linear_fc2.weight.mean(dim=1), bias

        first.forward = forward
        return chunks


def read_ahead(initial, *flags, wait=False):
    with training(*flags, initial=initial, probes=(ReadsAhead(wait=wait),)) as run:
        losses = [step(run).losses["lm loss"] for _ in range(3)]
        return losses, parameters(run).tensors


def all_read_ahead(dense):
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    recompute = (*recompute, "--recompute-num-layers", "1")
    return {
        "plain": read_ahead(dense, *BUCKETS),
        "stale": read_ahead(dense, *OVERLAP),
        "waited": read_ahead(dense, *OVERLAP, wait=True),
        "plain, recomputed": read_ahead(dense, *BUCKETS, *recompute),
        "waited, recomputed": read_ahead(dense, *OVERLAP, *recompute, wait=True),
        "not overlapped": read_ahead(dense, *SHARDED, wait=True),
    }


def read_ahead_alone(initial):
    return read_ahead(initial)


@pytest.fixture(scope="module")
def reading_ranks(single):
    return run_world(all_read_ahead, 2, single[0])


def test_a_weight_that_is_read_outside_its_modules_call_is_the_updated_one(single, reading_ranks):
    ((losses, weights),) = run_world(read_ahead_alone, 1, single[0])
    for found in reading_ranks:
        assert found["waited"][0] == pytest.approx(losses, rel=1e-6)
        assert distance(found["waited"][1], weights) < 1e-5
        assert abs(found["stale"][0][-1] - losses[-1]) > 1e-5


@pytest.mark.parametrize("kind", ["", ", recomputed"])
def test_waiting_trains_to_the_bit_what_trains_without_the_overlap(reading_ranks, kind):
    for found in reading_ranks:
        assert found[f"waited{kind}"][0] == found[f"plain{kind}"][0]
        assert distance(found[f"waited{kind}"][1], found[f"plain{kind}"][1]) == 0.0


def test_waiting_does_nothing_where_parameters_are_complete(reading_ranks):
    for found in reading_ranks:
        assert found["not overlapped"][0] == pytest.approx(found["plain"][0], rel=1e-6)


def test_a_model_that_nobody_knows_is_refused():
    with pytest.raises(SessionError, match="knows no model"):
        complete_parameters([])


def test_a_model_known_without_its_wrapper_is_refused():
    model = torch.nn.Linear(2, 2)
    model.weight.main_grad = torch.zeros(2, 2)
    with pytest.raises(SessionError, match="without its wrapper"):
        complete_parameters([model])
    # A model that no data parallelism has wrapped has nothing to gather.
    complete_parameters([torch.nn.Linear(2, 2)])


def test_parameters_that_share_the_memory_of_gradients_are_refused():
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapper)
    options = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=True)
    wrapper.use_forward_hook, wrapper.ddp_config = True, options
    pending = SimpleNamespace(ddp_config=options, param_gather_dispatched=False)
    wrapper.bucket_groups, wrapper.expert_parallel_bucket_groups = [pending], []
    with pytest.raises(SessionError, match="reuse-grad-buf-for-mxfp8-param-ag"):
        complete_parameters([wrapper])


class Weighed:
    """Sums up the parameters in stages that are said to see complete ones."""

    def __init__(self):
        self.found = {}

    def weigh(self, stage, run):
        parameters = (parameter.detach() for chunk in run.model for parameter in chunk.parameters())
        total = sum(parameter.double().square().sum() for parameter in parameters)
        self.found.setdefault(stage, []).append(float(total))

    @hookimpl(wrapper=True)
    def evaluate(self, run):
        self.weigh("evaluate", run)
        return (yield)

    @hookimpl(wrapper=True)
    def save_checkpoint(self, run):
        self.weigh("save_checkpoint", run)
        return (yield)

    @hookimpl
    def checkpoint_state(self, run):
        self.weigh("checkpoint_state", run)
        return {}

    @hookimpl(wrapper=True)
    def finish_run(self, run):
        self.weigh("finish_run", run)
        return (yield)


def whole_run(folder, *flags):
    probe = Weighed()
    run_flags = ("--save", folder, "--run-dir", folder, "--save-interval", "2")
    evaluation = ("--eval-iters", "1", "--eval-interval", "2")
    command = training_flags((*flags, *run_flags, *evaluation), 3)
    with activate(command, platform="cpu", extra_plugins=[probe], host="standalone") as session:
        history = loop.train(session).history
    return probe.found, [record.get("loss") for record in history]


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    return [run_world(whole_run, 2, f"{folder}/{len(flags)}", *flags) for flags in (BUCKETS, OVERLAP)]


@pytest.mark.parametrize("stage", ["evaluate", "save_checkpoint", "checkpoint_state", "finish_run"])
def test_stages_that_are_said_to_see_complete_parameters_do(whole_runs, stage):
    for (plain, _), (overlapped, _) in zip(*whole_runs):
        assert overlapped[stage] == plain[stage]


def test_a_whole_run_with_validation_and_saves_is_the_same_to_the_bit(whole_runs):
    (plain, *_), (overlapped, *_) = whole_runs
    assert overlapped[1] == plain[1]
