"""Weights to start from, and training without gloo groups of megatron-core's own."""

from __future__ import annotations

import pytest

from mindspeed_core.feature import hookimpl
from mindspeed_testing.worlds import run_world

SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 32 --seq-length 16 "
    "--vocab-size 64 --make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 4 --lr 1e-2 --mock-data --num-workers 0 --eval-iters 0 --platform cpu "
    "--use-cpu-initialization --attention-dropout 0 --hidden-dropout 0"
).split()


def trained(*flags, steps=2, save=False, probes=()):
    """Train and return step numbers and losses; a session of its own."""
    import multiprocessing

    from mindspeed_core.activation import activate
    from mindspeed_core.errors import CheckpointError
    from mindspeed_train import loop

    # The ranks of a world are daemons, which may not fork; the writers of a checkpoint are forks.
    multiprocessing.current_process()._config["daemon"] = False
    session = activate([*SMALL, *flags], host="standalone", platform="cpu", extra_plugins=probes)
    with session:
        try:
            run = loop.setup(session)
        except CheckpointError as error:
            loop.teardown(session)
            return str(error)
        found = [run.iteration]
        for _ in range(steps):
            found.append(session.call("train_step", run=run).losses["lm loss"])
            run.iteration += 1
            run.consumed_train_samples += run.args.global_batch_size
        if save:
            session.call("save_checkpoint", run=run, reason="end")
        loop.teardown(session)
        return found


def pretrained(folder):
    base = trained("--save", f"{folder}/base", save=True)
    start = ("--pretrained-checkpoint", f"{folder}/base", "--lr", "5e-3")
    own = ("--save", f"{folder}/own", "--load", f"{folder}/own")
    return {
        "base": base,
        "finetuned": trained("--finetune", "--load", f"{folder}/base", "--lr", "5e-3", steps=4),
        "first": trained(*start, *own, "--exit-on-missing-checkpoint", save=True),
        "again": trained(*start, *own),
        "alone": trained(*start, steps=4),
        "missing": trained("--pretrained-checkpoint", f"{folder}/none", *own[2:], "--ckpt-step", "9"),
        "nowhere": trained("--pretrained-checkpoint", f"{folder}/none", "--load", f"{folder}/none"),
    }


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    return run_world(f"{__name__}:pretrained", 1, str(tmp_path_factory.mktemp("starts")))[0]


def test_weights_of_another_checkpoint_start_a_run_at_step_0(starts):
    assert starts["first"] == starts["finetuned"][:3]
    assert starts["alone"] == starts["finetuned"]
    assert starts["first"][0] == 0
    assert starts["first"][1:] != starts["base"][1:]


def test_a_restart_goes_on_from_its_own_checkpoint(starts):
    assert starts["again"] == [2, *starts["finetuned"][3:]]


def test_a_folder_without_a_checkpoint_is_named(starts):
    assert "--ckpt-step 9" in starts["missing"]
    assert "--pretrained-checkpoint" in starts["nowhere"]
    assert "holds no checkpoint" in starts["nowhere"]


class Groups:
    """Notes whether megatron-core has gloo groups of its own."""

    def __init__(self):
        self.found = []

    @hookimpl(wrapper=True)
    def build_process_groups(self):
        from megatron.core import parallel_state

        pg = yield
        self.found.append(parallel_state._DATA_PARALLEL_GROUP_GLOO is not None)
        return pg


def without_gloo_groups(folder):
    groups = Groups()
    expected = trained("--use-distributed-optimizer", steps=4, probes=[groups])
    found = {}
    for flag in ("--disable-gloo-process-groups", "--disable-gloo-group"):
        save = f"{folder}/run{flag}"
        sharded = ("--use-distributed-optimizer", "--save", save)
        first = trained(flag, *sharded, save=True, probes=[groups])
        found[flag] = first[1:] + trained(flag, *sharded, "--load", save)[1:]
    return expected[1:], found, groups.found


def test_nothing_is_lost_without_gloo_groups(tmp_path):
    for expected, found, groups in run_world(f"{__name__}:without_gloo_groups", 2, str(tmp_path)):
        assert found["--disable-gloo-process-groups"] == expected
        assert found["--disable-gloo-group"] == expected
        assert groups == [True, False, False]
