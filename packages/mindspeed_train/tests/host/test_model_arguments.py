"""Refusals of impossible models and layouts before training, with flag, reason and way out."""

import pytest

from mindspeed_core.activation import prepare
from mindspeed_core.errors import ArgumentError
from mindspeed_core.registry import Registry
from mindspeed_megatron.config_fields import config_fields
from mindspeed_megatron.newer_fields import newer_fields
from mindspeed_train.arguments.refusals import REFUSALS, option_of

SMALL = (
    "--platform cpu --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --vocab-size 128 --mock-data --train-iters 4 --lr 1e-3"
).split()
MOE = "--num-experts 4"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
LATENT = "--multi-latent-attention"


@pytest.fixture(scope="module")
def registry():
    return Registry.of(())


@pytest.fixture
def validate(registry, monkeypatch):
    def run(flags, world=1):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        with prepare([*SMALL, *flags.split()], registry=registry, host="standalone") as session:
            args = session.call("validate_arguments_early", args=session.args, plan=session.plan)
            return session.call("validate_arguments", args=args, plan=session.plan)

    return run


@pytest.mark.parametrize(
    ("flags", "world", "named"),
    [
        (f"{MOE} {TP2}", 2, ["--num-experts 4", "--sequence-parallel"]),
        (
            f"{MOE} {TP2} --sequence-parallel --expert-tensor-parallel-size 2",
            2,
            ["--disable-bias-linear", "--expert-tensor-parallel-size 1"],
        ),
        ("--num-experts 3 --expert-model-parallel-size 2", 2, ["--num-experts 3"]),
        (f"{MOE} --expert-model-parallel-size 4", 2, ["--expert-model-parallel-size 4", "world size 2"]),
        ("--expert-model-parallel-size 2", 2, ["--num-experts"]),
        ("--moe-ffn-hidden-size 32", 1, ["--moe-ffn-hidden-size 32", "--num-experts"]),
        (f"{MOE} --moe-router-topk 5", 1, ["--moe-router-topk 5"]),
        (f"{MOE} --moe-router-topk 1", 1, ["--moe-router-pre-softmax"]),
        (f"{MOE} --moe-layer-freq [0,1]", 1, ["--moe-layer-freq", "--num-layers is 4"]),
        (
            f"{MOE} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
            1,
            ["--moe-aux-loss-coeff", "sinkhorn"],
        ),
        (
            f"{MOE} --moe-expert-capacity-factor 3 --moe-pad-expert-input-to-capacity",
            1,
            ["--moe-expert-capacity-factor 3.0", "at most"],
        ),
        (f"{MOE} --moe-apply-probs-on-input", 1, ["--moe-router-topk 1"]),
        (f"{LATENT} --group-query-attention", 1, ["--group-query-attention"]),
        (f"{LATENT} --qk-layernorm {TP2}", 2, ["--qk-layernorm", "--sequence-parallel"]),
        (f"{LATENT} --softmax-scale 0.5", 1, ["--softmax-scale 0.5", "--mscale"]),
        ("--rope-type yarn", 1, ["--rope-type", "--use-rope-scaling"]),
        (f"--mtp-num-layers 1 {PP2}", 2, ["--mtp-num-layers 1", "--position-embedding-type rope"]),
        (
            "--mtp-num-layers 1 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 2 --num-layers 2",
            1,
            ["--mtp-num-layers 1", "uniform"],
        ),
        ("--moe-layer-freq [0,1]", 1, ["--moe-layer-freq", "--num-experts"]),
        (
            f"--mtp-num-layers 1 --position-embedding-type rope {PP2}",
            2,
            ["--untie-embeddings-and-output-weights"],
        ),
        (
            f"--mtp-num-layers 1 --untie-embeddings-and-output-weights --position-embedding-type rope {PP2} "
            "--pipeline-model-parallel-layout Et|ttt|m|L",
            2,
            ["--pipeline-model-parallel-layout", "between t and L"],
        ),
        (f"{PP2} --pipeline-model-parallel-layout Et|tL", 2, ["--pipeline-model-parallel-layout"]),
        ("--pipeline-model-parallel-layout EttttL", 1, ["one pipeline stage"]),
        (
            f"{PP2} --decoder-first-pipeline-num-layers 1 --account-for-loss-in-pipeline-split",
            2,
            ["--account-for-loss-in-pipeline-split", "--decoder-first-pipeline-num-layers"],
        ),
        (f"{MOE} --moe-shared-expert-intermediate-size 32", 1, ["--disable-bias-linear"]),
        (f"{PP2} --num-layers 5", 2, ["--num-layers 5", "--pipeline-model-parallel-layout"]),
        (
            f"{PP2} --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
            2,
            ["--no-overlap-p2p-communication", "mixes up"],
        ),
        ("--fp16 --bf16", 1, ["--fp16", "--bf16"]),
        ("--deterministic-mode --cross-entropy-loss-fusion", 1, ["--cross-entropy-loss-fusion", "same bits"]),
        ("--window-size 8,0 --create-attention-mask-in-dataloader", 1, ["--window-size", "mask"]),
        ("--recompute-granularity selective --recompute-num-layers 1", 1, ["--recompute-num-layers 1"]),
        (
            "--recompute-granularity selective --recompute-modules mlp",
            1,
            ["--recompute-modules", "--disable-bias-linear"],
        ),
        ("--quick-geglu --swiglu", 1, ["--quick-geglu", "--swiglu"]),
    ],
)
def test_what_cannot_train_is_refused_by_name(validate, flags, world, named):
    with pytest.raises(ArgumentError) as refused:
        validate(flags, world)
    for text in named:
        assert text in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--fp8-format hybrid",
        "--experimental-attention-variant gated_delta_net",
        "--hybrid-override-pattern M*M*",
        "--is-hybrid-model",
        "--heterogeneous-layers-config-path layers.json",
        "--use-precision-aware-optimizer --exp-avg-dtype bf16",
        "--num-distributed-optimizer-instances 2",
        "--apply-residual-connection-post-layernorm",
        # Options of such parts, away from their defaults.
        "--fp8-margin 1",
        "--qk-clip-threshold 50",
        "--mamba-state-dim 64",
        "--muon-momentum 0.9",
    ],
)
def test_what_needs_other_packages_or_another_loop_is_refused(validate, flags):
    with pytest.raises(ArgumentError) as refused:
        validate(flags)
    named = next(word for word in flags.split() if word.startswith("--"))
    assert str(refused.value).startswith(named)
    assert ";" in str(refused.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--transformer-impl transformer_engine",
        "--moe-permute-fusion",
        "--tp-comm-overlap",
        "--attention-backend flash",
        "--cpu-offloading",
        "--moe-token-dispatcher-type flex",
        f"{MOE} --moe-grouped-gemm",
        "--use-precision-aware-optimizer",
        "--optimizer-cpu-offload",
        "--overlap-param-gather-with-optimizer-step",
        "--config-logger-dir logged",
        "--no-tp-comm-bulk-wgrad",
        "--cuda-graph-warmup-steps 5",
        "--optimizer-offload-fraction 0.5",
        "--moe-deepep-num-sms 10",
        "--hierarchical-context-parallel-sizes 2 2",
    ],
)
def test_what_only_computes_otherwise_stands_down_and_leaves_the_arguments_of_a_run_without_it(
    validate, flags, registry
):
    own = [word for word in flags.split() if word.startswith("--")][-1]
    plain = vars(validate(MOE if MOE in flags else ""))
    changed = {name for name, value in vars(validate(flags)).items() if plain[name] != value}
    # Without experts the choice of a dispatcher changes nothing either.
    assert changed <= {"moe_token_dispatcher_type"}
    notes = prepare([*SMALL, *flags.split()], registry=registry, host="standalone").plan.flag_notes
    assert [note for note in notes if note.flag.partition(" ")[0] == own]


@pytest.mark.parametrize(("flags", "cut"), [("", 1), ("--disable-bias-linear", 2)])
def test_experts_with_biases_stay_whole(validate, flags, cut):
    args = validate(f"{MOE} {TP2} --sequence-parallel {flags}", 2)
    assert (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) == cut


def test_the_default_of_an_option_without_effect_is_no_mistake(validate):
    validate("--fp8-margin 0 --fp8-recipe delayed --qk-clip-threshold 100 --mamba-state-dim 128")


def test_every_refusal_names_a_flag_of_the_host(registry):
    from mindspeed_train.flags import host_flags

    options = {option for flag in host_flags() for option in flag.options}
    installed = {field.name for field in config_fields()}
    # Of other megatron-cores: fields of newer ones, and those that newer ones dropped.
    later = {one.name for one in newer_fields()} - installed
    dropped = {"moe_use_legacy_grouped_gemm", "muon_use_nesterov"} - installed
    assert {option_of(r.dest) for r in REFUSALS if r.dest not in later | dropped} <= options


def test_a_feature_that_declares_the_flag_is_trusted(monkeypatch):
    from mindspeed_core.feature import Feature, Flag

    class Fused(Feature):
        """Fused permutation without TransformerEngine."""

        name = "fused-permutation"
        family = "test"
        summary = "Fused permutation."
        flags = (Flag("--moe-permute-fusion", help="Fuse."),)

    monkeypatch.setenv("WORLD_SIZE", "1")
    with prepare(
        [*SMALL, *MOE.split(), "--moe-permute-fusion"], registry=Registry.of([Fused]), host="standalone"
    ) as session:
        args = session.call("validate_arguments_early", args=session.args, plan=session.plan)
        checked = session.call("validate_arguments", args=args, plan=session.plan)
    assert checked.moe_permute_fusion


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ("--num-virtual-stages-per-pipeline-rank 2", 2),
        ("--num-layers-per-virtual-pipeline-stage 1", 2),
        ("--num-layers-per-virtual-pipeline-stage 2", None),
        ("--pipeline-model-parallel-layout E|tt|t|tL", 2),
        ("--pipeline-model-parallel-layout Et|tttL", None),
        ("--decoder-first-pipeline-num-layers 1", None),
    ],
)
def test_the_number_of_chunks_follows_from_the_layout(validate, flags, chunks):
    assert validate(f"{PP2} --global-batch-size 2 {flags}", 2).virtual_pipeline_model_parallel_size == chunks


def test_dynamic_loss_scaling_does_not_stop_at_gradients_that_are_not_finite(validate):
    assert not validate("--fp16").check_for_nan_in_loss_and_grad
    assert validate("--fp16 --loss-scale 128").check_for_nan_in_loss_and_grad
