"""Optimizer state of a loop of one's own gathered in slices, without groups of gloo."""

import pytest
from own_loop import OwnLoop, Recorded, described, of_the_batches
from test_library_dry_run import batch

from mindspeed_core import activate
from mindspeed_core.errors import UserError
from mindspeed_testing import run_world

FLAGS = ("--disable-gloo-group", "--hccl-slice-size", "1000")
KEYS = ("param", "exp_avg", "exp_avg_sq")


def gathered():
    """Make groups of gloo first, then none; train a step in two replicas and gather the state both ways."""
    import torch
    from megatron.core import parallel_state, tensor_parallel

    from mindspeed_megatron.instruments.communication import count_communication

    args, configs = described("--use-distributed-optimizer", "--num-layers", "2", *FLAGS)
    with activate([*of_the_batches(args), *FLAGS], platform="cpu", configs=configs) as session:
        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel()
        with pytest.raises(UserError) as refused:
            session.config(configs[0])
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        own = OwnLoop(session, configs, Recorded(), args)
        own.step([[batch(args)]], args)
        (part,) = getattr(own.optimizer, "chained_optimizers", [own.optimizer])
        whole = type(part).get_parameter_state_dp_zero(part, use_gloo_comm=False)
        with count_communication() as log:
            state = part.get_parameter_state_dp_zero()
        alike = None
        if state is not None:
            # One buffer, of one dtype.
            (ours,), (theirs,) = state[0].values(), whole[0].values()
            alike = all(torch.equal(ours[key], theirs[key]) for key in KEYS)
        return str(refused.value), alike, len(log.select("gather"))


@pytest.fixture(scope="module")
def ranks():
    return run_world(gathered, 2)


def test_the_first_rank_has_the_state_that_megatron_core_gathers(ranks):
    assert [alike for _, alike, _ in ranks] == [True, None]
    assert all(gathers > len(KEYS) for *_, gathers in ranks)


def test_groups_of_gloo_that_the_program_made_are_refused_with_the_way_out(ranks):
    for message, *_ in ranks:
        assert "initialize_model_parallel with create_gloo_process_groups=False" in message
