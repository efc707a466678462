"""A run changes its layout twice on the way, and its losses do not show it."""

import pytest
from test_checkpoint_resume import NO_DROPOUT, close_run, open_run, save, train

from mindspeed_testing.worlds import run_world

MOE = tuple(
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --disable-bias-linear --swiglu "
    "--moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall".split()
)
SHARDED = ("--use-distributed-optimizer",)
EP2 = ("--expert-model-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
WHOLE = ("--expert-tensor-parallel-size", "1")
DEEP = ("--num-layers", "4")
PP2 = ("--pipeline-model-parallel-size", "2")
THOROUGH = ("ep1-ep2-ep1", "ep2-ep1-ep2, bfloat16")
INTERLEAVED = (*PP2, "--num-layers-per-virtual-pipeline-stage", "1")

COURSES = {
    "ep1-ep2-ep1": (MOE, [(), EP2, ()]),
    "ep1-ep2-ep1, sharded": ((*MOE, *SHARDED), [(), EP2, ()]),
    "ep2-ep1-ep2, bfloat16": ((*MOE, "--bf16"), [EP2, (), EP2]),
    "ep2-whole experts-cut experts": ((*MOE, *SHARDED), [EP2, (*TP2, *WHOLE), TP2]),
    "pp2-vpp2-pp1, sharded": ((*DEEP, *SHARDED), [PP2, INTERLEAVED, ()]),
}


def courses(folder, names):
    """For each course: four steps without a change after the first two, and the same in two other layouts."""
    found = {}
    for index, name in enumerate(names):
        model, layouts = COURSES[name]
        flags, root = [*model, *NO_DROPOUT], f"{folder}/{index}"
        run = open_run([*flags, *layouts[0], "--save", f"{root}/first"])
        train(run, 2)
        save(run)
        undisturbed = train(run, 4)
        close_run(run)
        run = open_run([*flags, *layouts[1], "--load", f"{root}/first", "--save", f"{root}/second"])
        steps = train(run, 2)
        save(run)
        close_run(run)
        run = open_run([*flags, *layouts[2], "--load", f"{root}/second"])
        steps += train(run, 2)
        close_run(run)
        found[name] = undisturbed, steps
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory, asked_for):
    names = [name for name in COURSES if name in asked_for("course")]
    return run_world(courses, 2, str(tmp_path_factory.mktemp("courses")), names, timeout=250)[0]


@pytest.mark.parametrize(
    "course",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in COURSES],
)
def test_losses_gradient_norms_and_rates_go_on_through_two_changes_of_layout(trained, course):
    undisturbed, resharded = trained[course]
    # Ranks round gradients before they add them up: another number of ranks, another rounding.
    tolerance = 1e-3 if "bfloat16" in course else 1e-6
    assert numbers(resharded[:1]) == pytest.approx(numbers(undisturbed[:1]), rel=1e-6)
    assert numbers(resharded) == pytest.approx(numbers(undisturbed), rel=tolerance)


def numbers(steps):
    return [float.fromhex(value) for step in steps for value in step]
