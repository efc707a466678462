"""Checkpoints in Megatron-LM's layout, written and read with plain megatron-core as its program does."""

import random
import shlex
import signal
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from mindspeed_testing.worlds import run_world

FLAGS = shlex.split(
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 4 --train-iters 8 --lr 1e-2 "
    "--mock-data --num-workers 0 --eval-iters 0 --attention-dropout 0.1 --hidden-dropout 0.1"
)
SHARDED = ["--use-distributed-optimizer"]


def open_run(flags):
    from mindspeed_core.activation import activate
    from mindspeed_train import loop

    return loop.setup(activate([*FLAGS, *flags], host="standalone"))


def close_run(run):
    from mindspeed_train import loop

    loop.teardown(run.session)
    run.session.close()


def train(run, steps):
    found = []
    for _ in range(steps):
        result = run.session.call("train_step", run=run)
        run.iteration += 1
        run.consumed_train_samples += 4
        found.append((result.losses["lm loss"].hex(), float(result.grad_norm).hex()))
    return found


def metadata(run, **more):
    described = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True, **more}
    if run.args.use_distributed_optimizer:
        described["distrib_optim_sharding_type"] = "dp_reshardable"
    return described


def their_rng(run):
    import numpy as np
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng_state", [state], (1, 1), (0, 0), replica_id=run.pg.dp_cp.rank())


def their_state(run, described, is_loading):
    from mindspeed_megatron import optimizer_state

    state = {"model": run.model[0].module.sharded_state_dict(metadata=dict(described))}
    # megatron-core cannot describe torch's Adam before its first step; Megatron-LM users have Apex or TE.
    state["optimizer"] = optimizer_state.sharded_state(
        run.optimizer, {"model": state["model"]}, described, is_loading=is_loading
    )
    return state


def write_theirs(run, folder):
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.enums import AttnBackend

    from mindspeed_megatron import optimizer_state

    directory = Path(folder) / f"iter_{run.iteration:07d}"
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    described = metadata(run, dp_cp_group=run.pg.dp_cp)
    state = {
        "args": Namespace(
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            data_parallel_size=dist.get_world_size(),
            consumed_train_samples=run.consumed_train_samples,
            consumed_valid_samples=3,
            attention_backend=AttnBackend.auto,
            exit_signal=signal.SIGTERM.value,
        ),
        "checkpoint_version": 3.0,
        "iteration": run.iteration,
        "num_floating_point_operations_so_far": 1.5e9,
        "opt_param_scheduler": run.scheduler.state_dict(),
        "rng_state": their_rng(run),
        **their_state(run, described, False),
    }
    optimizer_state.forget_overrides(run.optimizer)
    dist_checkpointing.save(state, str(directory), content_metadata=metadata(run))
    (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(run.iteration))
    dist.barrier()


def theirs_read_here(folder, flags):
    run = open_run(flags)
    train(run, 2)
    write_theirs(run, folder)
    expected = train(run, 3)
    close_run(run)
    if not (Path(folder) / f"iter_{run.iteration - 3:07}" / "common.pt").exists():
        return refusal([*flags, "--load", folder, "--verify-checkpoint", "off"])
    run = open_run([*flags, "--load", folder, "--verify-checkpoint", "off"])
    start = (run.iteration, run.consumed_train_samples, run.consumed_valid_samples)
    found = train(run, 3)
    close_run(run)
    return expected, found, start


def refusal(flags):
    """Return what a run that cannot begin says."""
    from mindspeed_core.activation import activate
    from mindspeed_core.errors import CheckpointError
    from mindspeed_train import loop

    session = activate([*FLAGS, *flags], host="standalone")
    try:
        loop.setup(session)
    except CheckpointError as error:
        return str(error)
    finally:
        session.close()
    return "nothing"


def ours_read_there(folder, flags):
    import numpy as np
    import torch
    from megatron.core import dist_checkpointing, tensor_parallel
    from megatron.core.safe_globals import register_safe_globals

    from mindspeed_megatron import optimizer_state

    run = open_run([*flags, "--save", folder])
    train(run, 2)
    path = str(run.session.call("save_checkpoint", run=run, reason="interval").path)
    expected = train(run, 3)
    close_run(run)
    run = open_run(flags)
    # Random states as they would be in another program.
    torch.rand(17), random.random(), np.random.rand(5)
    # The order of Megatron-LM's load_checkpoint: common state, its args and metadata, then the template.
    register_safe_globals()
    common = dist_checkpointing.load_common_state_dict(path)
    described = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    args = common["args"]
    same_layout = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (1, 1)
    described["dp_cp_group"] = run.pg.dp_cp
    template = {**their_state(run, described, True), "rng_state": their_rng(run)}
    state = dist_checkpointing.load(template, path)
    run.model[0].module.load_state_dict(state["model"])
    optimizer_state.load_state(run.optimizer, state["optimizer"])
    optimizer_state.forget_overrides(run.optimizer)
    run.scheduler.load_state_dict(state["opt_param_scheduler"])
    run.iteration, run.consumed_train_samples = state["iteration"], args.consumed_train_samples
    run.data = run.session.call("build_data_iterators", run=run)
    rng = state["rng_state"][0]
    random.setstate(rng["random_rng_state"])
    np.random.set_state(rng["np_rng_state"])
    torch.set_rng_state(rng["torch_rng_state"])
    tensor_parallel.get_cuda_rng_tracker().set_states(rng["rng_tracker_states"])
    start = (run.iteration, run.consumed_train_samples, same_layout)
    found = train(run, 3)
    close_run(run)
    return expected, found, start


def world(folder):
    root = Path(folder)
    return {
        "theirs": theirs_read_here(str(root / "theirs"), []),
        "theirs, sharded": theirs_read_here(str(root / "theirs2"), SHARDED),
        "ours": ours_read_there(str(root / "ours"), []),
        "ours, sharded": ours_read_there(str(root / "ours2"), SHARDED),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_world(world, 2, str(tmp_path_factory.mktemp("exchange")), timeout=150)[0]


@pytest.mark.parametrize("case", ["theirs", "theirs, sharded"])
def test_a_checkpoint_of_megatron_lm_is_continued_bit_for_bit(results, case):
    if isinstance(results[case], str):
        # 0.19 keeps what all ranks hold alike among the shards.
        assert Version(version("megatron-core")) >= Version("0.19")
        assert "write it with core_v0.18 or older" in results[case]
        return
    expected, found, start = results[case]
    assert start == (2, 8, 3)
    assert found == expected


@pytest.mark.parametrize("case", ["ours", "ours, sharded"])
def test_megatron_lms_way_of_loading_continues_ours_bit_for_bit(results, case):
    expected, found, start = results[case]
    assert start == (2, 8, True)
    assert found == expected
