"""Fully sharded data parallelism trains like one process, and refuses what it would train wrongly."""

import pytest
from test_checkpoint_resume import NO_DROPOUT, close_run, open_run, save, train

from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry
from mindspeed_testing.worlds import run_world
from mindspeed_train.arguments.fully_sharded import check_fully_sharded

SHARDED = ("--use-torch-fsdp2", "--untie-embeddings-and-output-weights")
UNTIED = ("--untie-embeddings-and-output-weights",)
LLAMA = (
    *UNTIED,
    *"--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear".split(),
)


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        pytest.param((), 2, id="dp2"),
        pytest.param(
            "--torch-fsdp2-no-reshard-after-forward --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1".split(),
            2,
            id="dp2-kept-parameters-recompute",
        ),
        pytest.param(("--tensor-model-parallel-size", "2", "--sequence-parallel"), 4, id="tp2-dp2"),
    ],
)
def test_sharded_parameters_train_like_one_process(mindspeed_equivalence, layout, size):
    mindspeed_equivalence((*SHARDED, *layout), UNTIED, world_size=size, baseline_world_size=1)


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        pytest.param((), 2, id="dp2"),
        pytest.param(("--tensor-model-parallel-size", "2", "--sequence-parallel"), 4, id="tp2-dp2"),
    ],
)
def test_gated_layers_are_cut_as_they_lie_in_memory(mindspeed_equivalence, layout, size):
    mindspeed_equivalence((*SHARDED, *LLAMA, *layout), LLAMA, world_size=size, baseline_world_size=1)


@pytest.mark.parametrize("dtype", [(), ("--bf16",)], ids=["fp32", "bf16"])
def test_a_run_resumes_bit_for_bit_and_other_layouts_take_it_over(tmp_path, dtype):
    for results in run_world(f"{__name__}:resume_rank", 2, str(tmp_path), dtype, timeout=200):
        assert results["resumed"] == results["went on"]
        if not dtype:
            went_on = losses(results["went on"])
            assert losses(results["replicated"]) == pytest.approx(went_on, rel=1e-5)
            assert losses(results["sharded again"]) == pytest.approx(went_on, rel=1e-5)


def resume_rank(folder, dtype):
    """Train sharded, save after two steps, and train two steps on from there in several ways."""
    sharded, replicated = ["--use-torch-fsdp2", *LLAMA, *dtype], [*LLAMA, *dtype]
    results = {}
    run = open_run([*sharded, *NO_DROPOUT, "--save", f"{folder}/sharded"])
    train(run, 2)
    save(run)
    results["went on"] = train(run, 2)
    close_run(run)
    run = open_run([*sharded, *NO_DROPOUT, "--load", f"{folder}/sharded"])
    results["resumed"] = train(run, 2)
    close_run(run)
    if not dtype:
        run = open_run([*replicated, *NO_DROPOUT, "--load", f"{folder}/sharded"])
        results["replicated"] = train(run, 2)
        close_run(run)
        run = open_run([*replicated, *NO_DROPOUT, "--save", f"{folder}/replicated"])
        train(run, 2)
        save(run)
        close_run(run)
        run = open_run([*sharded, *NO_DROPOUT, "--load", f"{folder}/replicated"])
        results["sharded again"] = train(run, 2)
        close_run(run)
    return results


def test_a_gradient_that_went_bad_on_one_rank_is_named_and_ends_the_run():
    first, second = run_world(f"{__name__}:spoiled_rank", 2, timeout=200)
    assert first == second
    assert "the gradient of output_layer.weight holds nan in 1 of" in first
    assert "elements on rank 1" in first


def spoiled_rank():
    from mindspeed_train.fault_tolerance import bad_steps

    run = open_run(["--use-torch-fsdp2", *LLAMA])
    train(run, 1)
    if run.dist.rank == 1:
        run.model[0].module.output_layer.weight.grad.to_local()[0, 0] = float("nan")
    with pytest.raises(UserError) as caught:
        bad_steps.verdict(run, {"lm loss": 4.0})
    close_run(run)
    return str(caught.value)


def losses(steps):
    return [float.fromhex(loss) for loss, *_ in steps]


def test_each_rank_holds_its_part_of_every_parameter():
    for parts, whole in run_world(f"{__name__}:held_rank", 2, timeout=200):
        assert parts * 2 == whole


def held_rank():
    run = open_run(["--use-torch-fsdp2", *LLAMA])
    parameters = list(run.model[0].parameters())
    held = sum(parameter.to_local().numel() for parameter in parameters)
    close_run(run)
    return held, sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--untie-embeddings-and-output-weights"),
        ([*UNTIED, "--use-distributed-optimizer"], "--use-distributed-optimizer"),
        ([*UNTIED, "--overlap-grad-reduce"], "--overlap-grad-reduce"),
        ([*UNTIED, "--calculate-per-token-loss"], "--calculate-per-token-loss"),
        ([*UNTIED, "--fp16"], "--fp16"),
    ],
)
def test_what_would_train_wrongly_is_refused(flags, named):
    with pytest.raises(ArgumentError, match=named):
        check_fully_sharded(arguments(["--use-torch-fsdp2", *flags]))


def test_an_option_of_sharding_alone_is_refused():
    with pytest.raises(ArgumentError, match="nothing is sharded"):
        check_fully_sharded(arguments(["--torch-fsdp2-no-reshard-after-forward"]))


def arguments(flags):
    return flag_set(Registry.discover(), "standalone").parse(flags).args
