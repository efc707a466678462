"""Wrong sizes are refused before anything starts, naming flag, value and the way out."""

import pytest

from mindspeed_core.activation import prepare
from mindspeed_core.errors import ArgumentError
from mindspeed_core.registry import Registry

SMALL = (
    "--platform cpu --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --vocab-size 128 --mock-data --train-iters 4 --lr 1e-3"
).split()


@pytest.fixture(scope="module")
def registry():
    return Registry.of(())


@pytest.fixture
def validate(registry, monkeypatch):
    def run(*flags, world=1, without=(), mode="train"):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        command = list(SMALL)
        for flag in without:
            position = command.index(flag)
            del command[position : position + 2]
        with prepare([*command, *flags], registry=registry, mode=mode, host="standalone") as session:
            args = session.call("validate_arguments_early", args=session.args, plan=session.plan)
            return session.call("validate_arguments", args=args, plan=session.plan)

    return run


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--hidden-size", "66"], ["--hidden-size 66", "--num-attention-heads 4"]),
        (["--num-layers", "0"], ["--num-layers 0"]),
        (["--attention-dropout", "1"], ["--attention-dropout 1.0"]),
        (["--group-query-attention", "--num-query-groups", "3"], ["--num-query-groups 3"]),
        (["--swiglu", "--squared-relu"], ["--squared-relu", "--swiglu"]),
        (["--global-batch-size", "0"], ["--global-batch-size 0"]),
        (["--max-position-embeddings", "16"], ["--seq-length 32", "16"]),
        (["--min-lr", "1"], ["--min-lr 1.0", "--lr 0.001"]),
        (["--lr", "3.4e38"], ["--lr 3.4e+38", "--adam-beta1 0.9"]),
        (["--decoupled-lr", "3.4e38"], ["--decoupled-lr 3.4e+38", "--adam-beta1 0.9"]),
        (["--lr", "1e30", "--weight-decay", "1e20"], ["--lr 1e+30", "weight decay of 1e+20"]),
        (["--lr-warmup-iters", "4"], ["--lr-warmup-iters 4"]),
        (["--lr-warmup-init", "1"], ["--lr-warmup-init 1.0", "--lr 0.001"]),
        (["--start-weight-decay", "0.5"], ["--start-weight-decay 0.5", "0.01"]),
        (["--end-weight-decay", "0.5"], ["--weight-decay-incr-style linear"]),
        (
            ["--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"],
            ["--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"],
        ),
        (["--lr-decay-style", "WSD"], ["--lr-wsd-decay-iters"]),
        (["--save-interval", "2"], ["--save-interval 2", "--save"]),
        (["--recompute-granularity", "full"], ["--recompute-method"]),
        (["--num-layers-per-virtual-pipeline-stage", "1"], ["--pipeline-model-parallel-size"]),
        (["--overlap-param-gather"], ["--use-distributed-optimizer"]),
        (["--use-distributed-optimizer", "--optimizer", "sgd"], ["--use-distributed-optimizer", "adam"]),
        (["--ddp-num-buckets", "2", "--ddp-bucket-size", "9"], ["--ddp-num-buckets 2", "--ddp-bucket-size"]),
        (["--reset-attention-mask"], ["--create-attention-mask-in-dataloader"]),
        (["--num-experts", "4", "--variable-seq-lengths"], ["--moe-token-dispatcher-type alltoall"]),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(validate, flags, named):
    with pytest.raises(ArgumentError) as refused:
        validate(*flags)
    for text in named:
        assert text in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--tensor-model-parallel-size", "3"], ["tensor x pipeline x context = 3"]),
        (["--pipeline-model-parallel-size", "4", "--num-layers", "6"], ["--num-layers 6"]),
        (["--tensor-model-parallel-size", "4", "--num-attention-heads", "2"], ["--num-attention-heads 2"]),
        (
            ["--tensor-model-parallel-size", "4", "--sequence-parallel", "--seq-length", "30"],
            ["--seq-length 30"],
        ),
        (["--global-batch-size", "6"], ["--global-batch-size 6", "1 x 4 = 4"]),
        (["--context-parallel-size", "2"], ["--context-parallel-size 2", "plugin"]),
        (
            [
                *("--pipeline-model-parallel-size", "2"),
                *("--num-layers-per-virtual-pipeline-stage", "1"),
                *("--global-batch-size", "4", "--no-overlap-p2p-communication"),
            ],
            ["--no-overlap-p2p-communication"],
        ),
    ],
)
def test_sizes_that_do_not_fit_four_processes_are_refused(validate, flags, named):
    with pytest.raises(ArgumentError) as refused:
        validate(*flags, world=4)
    for text in named:
        assert text in str(refused.value)


@pytest.mark.parametrize(
    "flag",
    ["--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--train-iters", "--lr"],
)
def test_a_missing_value_is_asked_for(validate, flag):
    with pytest.raises(ArgumentError, match=flag):
        validate(without=[flag])


def test_inference_needs_neither_data_nor_learning_rate(validate):
    assert validate(without=["--lr", "--train-iters"], mode="inference").data_parallel_size == 1


def test_swiglu_keeps_the_parameter_count_of_the_mlp(validate):
    assert validate("--swiglu", "--hidden-size", "192").ffn_hidden_size == 512


def test_the_vocabulary_is_padded_for_every_tensor_parallel_rank(validate):
    args = validate("--tensor-model-parallel-size", "2", "--vocab-size", "130", world=2)
    assert args.padded_vocab_size == 256


def test_micro_batches_follow_from_the_global_batch(validate):
    args = validate("--global-batch-size", "8", world=2)
    assert (args.data_parallel_size, args.num_microbatches) == (2, 4)


def test_bfloat16_accumulates_in_float32(validate):
    assert validate("--bf16").accumulate_allreduce_grads_in_fp32
