"""A resumed run follows the schedule of the flags, or of the checkpoint: in every place that keeps it."""

from __future__ import annotations

import pytest
from test_checkpoint_resume import NO_DROPOUT, close_run, open_run, save, train
from test_other_model import attempt

from mindspeed_megatron.saved_schedule import group_values, settle_groups
from mindspeed_testing.worlds import run_world

CONSTANT = "--lr 6e-4 --min-lr 0 --lr-decay-style constant --train-iters 10 --lr-warmup-iters 0".split()
COSINE = "--lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --train-iters 10 --lr-warmup-iters 0".split()
DECOUPLED = ["--decoupled-lr", "5e-3", "--decoupled-min-lr", "1e-3"]
TAKE_FLAGS, TAKE_CHECKPOINT = "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"
# 1e-5 + 9e-5 * (1 + cos(pi * step / 10)) / 2 after steps 6 to 10
OF_COSINE = [4.109e-5, 2.855e-5, 1.859e-5, 1.220e-5, 1.000e-5]


def rates(results):
    return [float.fromhex(rate) for _, _, rate in results]


def resumed(*flags, steps=1):
    """Resume and train: learning rates, weight decays and betas of every group after each step."""
    run = open_run([*NO_DROPOUT, *flags])
    groups = run.optimizer.param_groups
    results = train(run, steps)
    found = {
        "rates": rates(results),
        "results": results,
        "groups": [(group["max_lr"], group["min_lr"], group["betas"][1]) for group in groups],
        "decay": [group["weight_decay"] for group in groups],
    }
    close_run(run)
    return found


def everything(folder, kind):
    # torch's optimizer and the distributed one find groups again in ways of their own.
    kind = [kind] if kind else []
    plain, decoupled = [*CONSTANT, *kind], [*CONSTANT, *DECOUPLED, *kind]
    run = open_run(["--save", f"{folder}/plain", *NO_DROPOUT, *plain])
    train(run, 5)
    save(run)
    close_run(run)
    load = ["--load", f"{folder}/plain", *kind]
    found = {
        "override": resumed(*load, *COSINE, TAKE_FLAGS, steps=5),
        "keep": resumed(*load, *COSINE, "--weight-decay", "0.1", TAKE_CHECKPOINT),
        "betas": resumed(*load, *CONSTANT, "--adam-beta2", "0.9", "--weight-decay", "0.1", TAKE_FLAGS),
    }
    half = ["--fp16", *CONSTANT, *kind]
    run = open_run(["--save", f"{folder}/half", *NO_DROPOUT, *half, "--loss-scale", "128"])
    save(run)
    close_run(run)
    found["scale"] = attempt([*NO_DROPOUT, "--load", f"{folder}/half", *half], 0)
    run = open_run(["--save", f"{folder}/decoupled", *NO_DROPOUT, *decoupled])
    train(run, 2)
    save(run)
    found["decoupled"] = train(run, 2)
    close_run(run)
    load_decoupled = ["--load", f"{folder}/decoupled", *CONSTANT, *kind]
    found["decoupled resumed"] = resumed(*load_decoupled, *DECOUPLED, steps=2)
    other = ["--decoupled-lr", "4e-3", "--decoupled-min-lr", "1e-3"]
    found["decoupled override"] = resumed(*load_decoupled, *other, TAKE_FLAGS)
    if kind:
        return found
    found["no optimizer"] = resumed(*load, *COSINE, "--no-load-optim", TAKE_FLAGS, steps=5)
    found["no optimizer, checkpoint's"] = resumed(*load, *COSINE, "--no-load-optim", TAKE_CHECKPOINT)
    refused = {
        "schedule": [*load, *COSINE],
        "betas": [*load, *CONSTANT, "--adam-beta2", "0.9"],
        "decoupled": [*load_decoupled, *other],
        "batch": [*load, *CONSTANT, "--global-batch-size", "8"],
        "finetune": [*load, *CONSTANT, "--finetune", TAKE_CHECKPOINT],
    }
    found["refused"] = {name: attempt([*NO_DROPOUT, *flags], 0)[0] for name, flags in refused.items()}
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run_world(everything, 1, str(tmp_path_factory.mktemp("courses")), "")[0]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return run_world(everything, 1, str(tmp_path_factory.mktemp("courses")), "--use-distributed-optimizer")[0]


@pytest.fixture(params=["plain", "sharded"])
def courses(request):
    return request.getfixturevalue(request.param)


def test_an_overridden_schedule_is_that_of_the_flags(courses):
    assert courses["override"]["rates"] == pytest.approx(OF_COSINE, rel=1e-3)


def test_a_kept_schedule_is_that_of_the_checkpoint(courses):
    assert courses["keep"]["rates"] == [6e-4]
    assert courses["keep"]["decay"] == [0.01, 0.0]


def test_constants_of_the_update_follow_the_same_rule(courses):
    assert [group[2] for group in courses["betas"]["groups"]] == [0.9, 0.9]
    assert courses["betas"]["decay"] == [0.1, 0.0]


def test_a_dynamic_loss_scale_starts_after_a_constant_one(courses):
    error, said, _, _ = courses["scale"]
    assert error == ""
    assert ["loss scale" in line for line in said] == [True]


def test_a_rate_of_the_embedding_alone_returns_to_the_embedding_alone(courses):
    assert courses["decoupled resumed"]["results"] == courses["decoupled"]
    assert [group[0] for group in courses["decoupled resumed"]["groups"]] == [6e-4, 5e-3, 6e-4]


def test_a_rate_of_the_embedding_is_overridden_too(courses):
    assert [group[0] for group in courses["decoupled override"]["groups"]] == [6e-4, 4e-3, 6e-4]


def test_a_schedule_goes_on_without_the_optimizers_state(plain):
    assert plain["no optimizer"]["rates"] == pytest.approx(OF_COSINE, rel=1e-3)
    assert plain["no optimizer, checkpoint's"]["rates"] == [6e-4]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("schedule", ["--lr 0.0006 (checkpoint) / 0.0001 (this run)", "--lr-decay-style constant"]),
        ("betas", ["--adam-beta2 0.999 (checkpoint) / 0.9 (this run)"]),
        ("decoupled", ["--decoupled-lr 0.005 (checkpoint) / 0.004 (this run)"]),
        ("batch", ["40 samples (checkpoint) / 80 samples (this run)", "--global-batch-size"]),
        ("finetune", ["--finetune"]),
    ],
)
def test_what_differs_is_refused_in_our_own_words(plain, case, words):
    error = plain["refused"][case]
    assert "class input value" not in error
    for word in (*words, "--use-checkpoint-opt-param-scheduler"):
        assert word in error


class Scheduler:
    """The part of megatron-core's scheduler that `settle_groups` uses."""

    use_checkpoint_opt_param_scheduler = False
    steps = 0

    def __init__(self, override):
        self.override_opt_param_scheduler = override

    def step(self, increment):
        self.steps += 1


def test_how_an_update_is_computed_is_the_runs_own():
    optimizer = type("Optimizer", (), {"param_groups": [{"fused": True, "eps": 1e-8, "params": []}]})()
    own = group_values(optimizer)
    optimizer.param_groups = [{"fused": None, "eps": 1e-8, "params": []}]
    assert settle_groups(optimizer, Scheduler(False), own, "there") == []
    assert optimizer.param_groups[0]["fused"] is True
