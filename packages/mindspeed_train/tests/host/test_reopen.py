"""One process trains, ends, and trains again with other features: nothing of the first run is left."""

import gc
import sys
from tempfile import TemporaryDirectory

import pytest

from mindspeed_core.feature import hookimpl
from mindspeed_testing import run_world

FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 128 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --eval-iters 0 --lr 1e-2 "
    "--train-iters 2 --use-cpu-initialization --swiglu --normalization RMSNorm --hidden-dropout 0 "
    "--attention-dropout 0"
).split()


def attributes():
    """Every attribute of the modules of torch and megatron, by identity."""
    return {
        (name, key): id(value)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("torch", "megatron") and module is not None
        for key, value in vars(module).items()
    }


def train_twice_with_other_features():
    import torch

    from mindspeed_core.activation import activate
    from mindspeed_train import loop

    deterministic, uncollected = [], []

    class Look:
        @hookimpl(wrapper=True)
        def train_step(self):
            uncollected.append(gc.get_freeze_count() > loop.IMMORTAL)
            return (yield)

    def train(*flags):
        with activate([*FLAGS, *flags], host="standalone") as session:
            run = loop.setup(session)
            losses = [session.call("train_step", run=run).losses["lm loss"] for _ in range(2)]
            names = session.plan.names
            deterministic.append(torch.are_deterministic_algorithms_enabled())
            loop.teardown(session)
        return names, losses

    plain = train()
    before = attributes()
    fused = train("--use-fused-rmsnorm", "--use-flash-attn", "--tensor-model-parallel-size", "2")
    after = attributes()
    train("--deterministic-mode")
    again = train()

    def look():
        with (
            activate(FLAGS, host="standalone", extra_plugins=[Look()]) as session,
            TemporaryDirectory() as folder,
        ):
            session.args.run_dir = folder
            loop.train(session)
        uncollected.append(gc.get_freeze_count() > loop.IMMORTAL)

    # The fork server left its imports out of collections.
    look()
    gc.unfreeze()
    look()
    changed = sorted(key for key in before if key in after and before[key] != after[key])
    return plain, fused, again, changed, deterministic, uncollected


@pytest.fixture(scope="module")
def ranks():
    return run_world(train_twice_with_other_features, 2)


def test_two_processes_meet_again_with_other_features_and_with_the_first(ranks):
    for plain, fused, again, *_ in ranks:
        assert plain == again
        assert plain[0] == ()
        assert set(fused[0]) >= {"fused-rmsnorm", "flash-attn"}


def test_no_symbol_of_torch_or_megatron_differs_after_a_session_with_features(ranks):
    changed = ranks[0][3]
    # What a training keeps in private module globals is state; symbols are the rest.
    assert [key for key in changed if not key[1].startswith("_")] == []


def test_deterministic_algorithms_are_used_by_the_run_that_asked_for_them_alone(ranks):
    *_, deterministic, _ = ranks[0]
    assert deterministic == [False, False, True, False]


def test_what_came_before_the_first_step_is_not_searched_for_garbage_until_the_run_ends(ranks):
    *_, uncollected = ranks[0]
    assert uncollected == [True, True, True, True, True, False]
