"""Megatron-FSDP trains like one process, and its checkpoints are those of every other layout."""

from importlib import util

import pytest
from test_checkpoint_resume import NO_DROPOUT, close_run, open_run, save, train

from mindspeed_core.errors import ArgumentError
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry
from mindspeed_testing.training import train_side
from mindspeed_testing.worlds import run_world
from mindspeed_train.arguments import fully_sharded

REPLICATED = ("--use-distributed-optimizer",)
MEGATRON = (*REPLICATED, "--use-megatron-fsdp", "--data-parallel-sharding-strategy")
FULL = (*MEGATRON, "optim_grads_params")
LLAMA = tuple(
    "--untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear".split()
)

THOROUGH = pytest.mark.thorough
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EP2 = ("--expert-model-parallel-size", "2")
MOE = tuple(
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --disable-bias-linear --swiglu "
    "--num-layers 2 --moe-aux-loss-coeff 0.01".split()
)


@pytest.mark.parametrize(
    ("layout", "model", "size"),
    [
        pytest.param((*MEGATRON, "no_shard"), (), 2, id="no_shard-dp2"),
        pytest.param((*MEGATRON, "optim"), (), 2, id="optim-dp2"),
        pytest.param(
            (*MEGATRON, "optim_grads", "--overlap-grad-reduce", "--overlap-param-gather"),
            (),
            2,
            id="optim_grads-overlap-dp2",
        ),
        pytest.param((*FULL, "--fsdp-double-buffer"), LLAMA, 4, id="optim_grads_params-dp4", marks=THOROUGH),
        pytest.param((*FULL, *TP2), LLAMA, 4, id="optim_grads_params-tp2-dp2", marks=THOROUGH),
        pytest.param((*FULL, *EP2), MOE, 2, id="optim_grads_params-experts-of-one-rank"),
        pytest.param((*FULL, *EP2, *TP2), MOE, 4, id="optim_grads_params-ep2-tp2", marks=THOROUGH),
    ],
)
def test_sharded_parameters_train_like_one_process(mindspeed_equivalence, layout, model, size):
    mindspeed_equivalence(
        (*layout, *model), model, world_size=size, baseline_world_size=1, steps=5, tolerance=5e-5
    )


def test_random_states_of_tensor_parallel_ranks_stay_apart():
    dropout = (*TP2, "--attention-dropout", "0.1", "--hidden-dropout", "0.1")
    replicated = train_side((*REPLICATED, *dropout), 2, 1, gradients=False)
    flags, initial = (*FULL, *dropout), replicated.initial
    ours = train_side(flags, 2, 1, initial=initial, gradients=False)
    probes = ("native_parts:NativeRandomStates",)
    without = train_side(flags, 2, 1, initial=initial, gradients=False, probes=probes)
    assert ours.losses["lm loss"] == pytest.approx(replicated.losses["lm loss"], rel=1e-6)
    assert abs(without.losses["lm loss"][0] / replicated.losses["lm loss"][0] - 1) > 1e-5


def test_without_us_gradients_of_a_rank_with_its_own_experts_are_too_large(mindspeed_equivalence):
    with pytest.raises(AssertionError, match="quantities differ"):
        mindspeed_equivalence(
            (*FULL, *EP2, *MOE),
            MOE,
            world_size=2,
            baseline_world_size=1,
            steps=1,
            probes=("native_parts:NativeReduction",),
        )


def test_what_is_refused_adds_a_ranks_own_gradient_twice(mindspeed_equivalence):
    with pytest.raises(AssertionError, match="quantities differ"):
        mindspeed_equivalence(
            (*MEGATRON, "optim"),
            (),
            world_size=2,
            baseline_world_size=1,
            steps=1,
            probes=("native_parts:OverlappedReduction",),
        )


def test_the_gradient_norm_of_unsharded_parameters_counts_them_once():
    one = train_side((), 1, 1, gradients=False)
    ours = train_side((*MEGATRON, "no_shard"), 2, 1, initial=one.initial, gradients=False)
    without = train_side(
        (*MEGATRON, "no_shard"),
        2,
        1,
        initial=one.initial,
        gradients=False,
        probes=("native_parts:NativeGradientNorm",),
    )
    assert ours.grad_norms[0] == pytest.approx(one.grad_norms[0], rel=1e-5)
    assert without.grad_norms[0] == pytest.approx(one.grad_norms[0] * 2**0.5, rel=1e-5)


def courses(folder, cases):
    """Train, save after two steps, and train two steps on from there: in the same way, and in others."""
    found = {}
    for name, (flags, others) in cases.items():
        course = found[name] = {}
        run = open_run([*flags, "--save", f"{folder}/{name}"])
        train(run, 2)
        save(run)
        course["went on"] = train(run, 2)
        close_run(run)
        for index, other in enumerate([flags, *others]):
            run = open_run([*other, "--load", f"{folder}/{name}"])
            course["resumed" if index == 0 else f"other {index}"] = train(run, 2)
            close_run(run)
    return found


SMALL_LLAMA = (*LLAMA, *NO_DROPOUT)
SMALL_MOE = (*MOE, *NO_DROPOUT)
CASES = {
    "bfloat16 with dropout": ((*FULL, *LLAMA, "--bf16"), [(*REPLICATED, *LLAMA, "--bf16")]),
    "parameters": (
        (*FULL, *SMALL_LLAMA),
        [
            (*REPLICATED, *SMALL_LLAMA, *TP2),
            (*MEGATRON, "optim", *SMALL_LLAMA),
        ],
    ),
    "nothing": ((*MEGATRON, "no_shard", *SMALL_LLAMA), [(*FULL, *SMALL_LLAMA)]),
    "replicated": ((*REPLICATED, *SMALL_LLAMA), [(*FULL, *SMALL_LLAMA)]),
    "experts": ((*FULL, *SMALL_MOE, *EP2), [(*FULL, *SMALL_MOE), (*REPLICATED, *SMALL_MOE, *EP2)]),
}


LONG_CASES = ("nothing", "replicated")


def marked(names):
    return [pytest.param(name, marks=[THOROUGH] * (name in LONG_CASES)) for name in names]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, asked_for):
    cases = {name: case for name, case in CASES.items() if name in asked_for("case")}
    return run_world(courses, 2, str(tmp_path_factory.mktemp("courses")), cases, timeout=250)[0]


@pytest.mark.parametrize("case", marked(CASES))
def test_a_run_resumes_bit_for_bit(trained, case):
    assert trained[case]["resumed"] == trained[case]["went on"]


@pytest.mark.parametrize("case", marked(case for case, (_, others) in CASES.items() if others))
def test_other_layouts_take_a_run_over_with_its_optimizer(trained, case):
    course = trained[case]
    others = [steps for name, steps in course.items() if name.startswith("other")]
    assert len(others) == len(CASES[case][1])
    for steps in others:
        assert numbers(steps) == pytest.approx(numbers(course["went on"]), rel=1e-6)


def numbers(steps):
    return [float.fromhex(value) for step in steps for value in step]


def one_rank(folder):
    """State of a rank, a save in the background, validation, and a gradient that went bad."""
    from mindspeed_core.errors import UserError
    from mindspeed_train.checkpoint.save import Saver
    from mindspeed_train.fault_tolerance import bad_steps

    run = open_run([*FULL, *SMALL_LLAMA, "--save", folder, "--async-save", "--eval-iters", "1"])
    train(run, 1)
    run.session.call("evaluate", run=run, split="valid")
    save(run)
    steps = [train(run, 1)]
    run.session.state(Saver).poll(blocking=True)
    buffers = [group.model_weight_buffer for group in run.model[0].param_and_grad_buffer.parameter_groups]
    held = sum(buffer.data.numel() for buffer in buffers)
    run.model[0].hold_parts()
    whole = sum(parameter.numel() for parameter in run.model[0].parameters())
    bad = next(p for p in run.model[0].parameters() if p.grad is not None)
    if run.dist.rank == 1:
        bad.grad._local_tensor.view(-1)[0] = float("nan")
    with pytest.raises(UserError) as caught:
        bad_steps.verdict(run, {"lm loss": 4.0})
    close_run(run)
    run = open_run([*FULL, *SMALL_LLAMA, "--load", folder, "--eval-iters", "1"])
    steps.append(train(run, 1))
    close_run(run)
    return {"held": held, "whole": whole, "bad": str(caught.value), "steps": steps}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_world(one_rank, 2, str(tmp_path_factory.mktemp("ranks")), timeout=100)


def test_each_rank_holds_its_part_of_the_parameters(ranks):
    for rank in ranks:
        # Buffers are padded to equal parts of whole rows.
        assert rank["whole"] / 2 <= rank["held"] < rank["whole"] / 2 * 1.05


def test_a_gradient_that_went_bad_on_one_rank_is_named(ranks):
    assert ranks[0]["bad"] == ranks[1]["bad"]
    assert "holds nan in 1 of" in ranks[0]["bad"]
    assert "elements on rank 1" in ranks[0]["bad"]


def test_a_checkpoint_written_beside_training_after_a_validation_resumes_bit_for_bit(ranks):
    assert ranks[0]["steps"][0] == ranks[0]["steps"][1]


def arguments(flags):
    return flag_set(Registry.discover(), "standalone").parse(flags).args


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--use-megatron-fsdp", "add --use-distributed-optimizer"),
        ("{full} --use-torch-fsdp2", "drop one of them"),
        (
            "{full} --pipeline-model-parallel-size 2",
            "--pipeline-model-parallel-size 2: .*with --use-",
        ),
        ("{full} --fp16", "use --bf16"),
        ("{full} --data-parallel-random-init", "--data-parallel-random-init"),
        ("{optim} --overlap-grad-reduce", "shard with optim_grads"),
        ("{none} --expert-model-parallel-size 2", "shard with optim"),
        ("{full} --moe-use-legacy-grouped-gemm", "not cut by rows"),
        ("--data-parallel-sharding-strategy optim", "add --use-megatron-fsdp"),
        ("--fsdp-double-buffer", "add --use-megatron-fsdp"),
    ],
)
def test_what_would_train_wrongly_is_refused(flags, named):
    kinds = {"full": FULL, "optim": (*MEGATRON, "optim"), "none": (*MEGATRON, "no_shard")}
    line = flags.format(**{name: " ".join(value) for name, value in kinds.items()})
    with pytest.raises(ArgumentError, match=named):
        fully_sharded.check_fully_sharded(arguments(line.split()))


def test_the_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setattr(
        fully_sharded, "find_spec", lambda name: None if name == "einops" else util.find_spec(name)
    )
    with pytest.raises(ArgumentError, match=r"einops.*pip install 'mindspeed-core\[fsdp\]'"):
        fully_sharded.check_fully_sharded(arguments(FULL))


def test_one_hardware_queue_is_refused_on_cuda_alone(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    args = arguments(FULL)
    fully_sharded.check_connections({"cpu"}, args)
    with pytest.raises(ArgumentError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
        fully_sharded.check_connections({"cuda"}, args)
