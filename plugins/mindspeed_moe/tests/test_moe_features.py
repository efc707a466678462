"""The declarations: sound, free of heavy imports, refused with flag, value and way out, proved."""

import pytest

from mindspeed_core.activation import plan_for, prepare
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_moe.features import DECLARATIONS
from mindspeed_moe.features.proofs import EP2, GATHER_OVERLAP, GATHERED, MODEL, OVERLAP, SHARED
from mindspeed_moe.options import LayerOptions
from mindspeed_testing.declared import declaration_faults
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.verify import verify


def test_declarations_are_sound_light_and_on_their_pages():
    assert declaration_faults("mindspeed_moe.features") == []


INSTALLED = Registry.discover()


def prepared(*flags):
    line = training_flags(flags, 1, INSTALLED)
    return prepare(line, platform="cpu", registry=INSTALLED, host="standalone")


def plan(*flags):
    return prepared(*flags).plan


def test_the_layer_of_experts_is_switched_on_and_sees_the_experts_that_were_placed():
    names = plan(*MODEL, *EP2, *OVERLAP).names
    assert names.index("moe-core") < names.index("grouped-experts")
    assert "moe-core" not in plan(*MODEL, *EP2).names


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
def test_every_host_takes_the_flags(host):
    made, _ = plan_for(
        [*MODEL[2:], *EP2, *OVERLAP, "--n-shared-experts", "2"], platform="cpu", host=host, registry=INSTALLED
    )
    assert {"moe-alltoall-overlap", "moe-shared-experts"} <= set(made.names)


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
def test_the_former_name_of_a_dispatcher_is_taken_by_every_host_and_noted_once(host):
    made, _ = plan_for(
        [*MODEL[2:], *EP2, *SHARED, *OVERLAP, "--moe-token-dispatcher-type", "alltoall_seq"],
        platform="cpu",
        host=host,
        registry=INSTALLED,
    )
    assert {"moe-alltoall-seq", "moe-alltoall-overlap"} <= set(made.names)
    (note,) = made.notes
    assert "--moe-token-dispatcher-type alltoall_seq is alltoall" in str(note)


def test_only_the_former_name_of_a_dispatcher_is_translated():
    assert "moe-alltoall-seq" not in plan(*MODEL, *EP2).names


ZERO = ("--moe-zero-memory",)
ADAPTIVE = ("--moe-adaptive-recompute-activation",)
ADAPTIVE_SCALE = ("--moe-adaptive-recompute-activation-scale",)
RECOMPUTED = (
    *("--recompute-granularity", "full"),
    *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
)
ASYNC = ("--moe-permutation-async-comm",)
BALANCED = ("--moe-device-level-aux-loss-coeff",)
FUSED = ("--use-fused-moe-token-permute-and-unpermute",)
CAPACITY = ("--moe-expert-capacity-factor", "1.0")
SINKHORN = ("--moe-router-load-balancing-type", "sinkhorn")


def without(flag, *, values=1):
    at = MODEL.index(flag)
    return (*MODEL[:at], *MODEL[at + 1 + values :])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*MODEL, *OVERLAP), "--expert-model-parallel-size 1 has no communication to hide; use 2 or more"),
        ((*without("--moe-grouped-gemm", values=0), *EP2, *OVERLAP), "add --moe-grouped-gemm"),
        ((*without("--moe-token-dispatcher-type"), *EP2, *OVERLAP), "--moe-token-dispatcher-type"),
        (OVERLAP, "without experts no token travels"),
        (
            (
                *(*MODEL, *SHARED, *EP2, *OVERLAP),
                *("--recompute-granularity", "selective", "--recompute-modules", "shared_experts"),
            ),
            "drop it from --recompute-modules, or use moe",
        ),
        ((*GATHERED, *EP2, "--moe-allgather-overlap-comm"), "add --moe-permutation-async-comm"),
        ((*GATHERED, *EP2, *OVERLAP), "it is the all-to-all that is hidden"),
        ((*MODEL, *EP2, *GATHER_OVERLAP), "it is the gathering that is hidden"),
        ((*MODEL, *EP2, *OVERLAP, "--use-megatron-fsdp"), "shards the weights of each expert"),
        (
            (*without("--moe-grouped-gemm", values=0), *EP2, *ZERO, "level0"),
            "computed again at once; add --moe-grouped-gemm",
        ),
        ((*MODEL, *ADAPTIVE_SCALE, "3"), "-scale 3 needs --moe-adaptive-recompute-activation; add it"),
        (
            (*MODEL, *ADAPTIVE, *ADAPTIVE_SCALE, "0"),
            "--moe-adaptive-recompute-activation-scale 0 is no multiple of the mean of rows",
        ),
        (
            (*MODEL, *ADAPTIVE, *RECOMPUTED),
            "--moe-adaptive-recompute-activation with --recompute-granularity full is redundant",
        ),
        (
            (
                *(*MODEL, *ADAPTIVE),
                *("--recompute-granularity", "selective", "--recompute-modules", "moe_act"),
            ),
            "--moe-adaptive-recompute-activation with --recompute-modules moe_act is redundant",
        ),
        ((*MODEL, *ADAPTIVE, "--moe-apply-probs-on-input"), "rows are kept apart from their"),
        (
            (*MODEL, *EP2, *OVERLAP, "--moe-zero-memory-num-layers", "1"),
            "--moe-zero-memory-num-layers 1 needs a level; add --moe-zero-memory level0 or level1",
        ),
        (
            (*MODEL, *EP2, *OVERLAP, *ZERO, "level0", "--moe-zero-memory-num-layers", "3"),
            "--moe-zero-memory-num-layers 3 is no number of layers of a pipeline stage, which has 2",
        ),
        (
            (*MODEL, *EP2, *OVERLAP, *ZERO, "level1", *RECOMPUTED),
            "--moe-zero-memory level1 with --recompute-granularity full is redundant",
        ),
        (
            (
                *(*MODEL, *EP2, *OVERLAP, *ZERO, "level0"),
                *("--recompute-granularity", "selective", "--recompute-modules", "moe"),
            ),
            "--moe-zero-memory level0 with --recompute-modules moe is redundant",
        ),
        ((*MODEL, "--n-shared-experts", "0"), "--n-shared-experts 0 is no number of experts"),
        (
            (*MODEL, *SHARED, "--n-shared-experts", "2"),
            "--moe-shared-expert-intermediate-size 48 cannot be used together: 2 experts of width 32 have 64",
        ),
        (("--n-shared-experts", "2"), "shared experts stand beside routed ones"),
        ((*MODEL, *EP2, *FUSED, *CAPACITY), "add --moe-pad-expert-input-to-capacity, or drop one"),
        ((*GATHERED, *EP2, *FUSED), "other dispatchers do not permute as many rows of each token"),
        ((*MODEL, *SHARED, *FUSED, "--moe-shared-expert-overlap"), "the dispatcher calls no shared experts"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags, message):
    with pytest.raises(PlanError) as error:
        plan(*flags)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*MODEL, *BALANCED, "0.1"), "--moe-device-level-aux-loss-coeff 0.1 has one device of experts"),
        (
            (*MODEL, "--moe-comm-aux-loss-coeff", "-1", "--moe-router-num-groups", "2"),
            "--moe-comm-aux-loss-coeff -1 would reward imbalance; use a number above 0",
        ),
        (
            (*MODEL, *BALANCED, "0.1", "--moe-router-num-groups", "3"),
            "--num-experts 4 has not on 3; use a multiple",
        ),
        ((*MODEL, *EP2, *BALANCED, "0.1", *CAPACITY), "choices are counted before any is dropped"),
        (
            (*without("--moe-aux-loss-coeff"), *EP2, *BALANCED, "0.1", *SINKHORN),
            "routes are then not those of the scores",
        ),
        ((*MODEL, *EP2, *BALANCED, "0.1", "--fix-router"), "router"),
        ((*MODEL, "--fix-router", *CAPACITY), "experts that are evenly loaded drop nothing"),
        (
            (*without("--moe-aux-loss-coeff"), "--fix-router", *SINKHORN),
            "both choose the routes; keep one of the two",
        ),
        (
            (
                *(*MODEL, "--fix-router", "--moe-router-enable-expert-bias"),
                *("--moe-router-score-function", "sigmoid"),
            ),
            "the bias learns from routes that are not taken",
        ),
        (("--fix-router",), "without experts there are no routes"),
    ],
)
def test_what_routers_cannot_do_is_refused_with_the_way_out(flags, message):
    with pytest.raises(PlanError) as error:
        plan(*flags)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ((), "without shared experts only the gradients of dispatched rows are hidden"),
        ((*SHARED, "--moe-shared-expert-overlap"), "--moe-shared-expert-overlap changes nothing"),
    ],
)
def test_what_stays_exposed_is_said(flags, note):
    (said,) = plan(*MODEL, *EP2, *OVERLAP, *flags).notes
    assert note in str(said)


def test_a_flag_without_communication_to_launch_is_noted():
    (said,) = plan(*MODEL, *ASYNC).notes
    assert "--moe-permutation-async-comm has no effect: all experts are on one rank" in str(said)
    assert plan(*MODEL, *EP2, *ASYNC).notes == ()


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
@pytest.mark.parametrize("flags", [FUSED, ("--moe-permute-fusion",)])
def test_both_spellings_of_fused_permutation_are_taken_by_every_host(host, flags):
    made, _ = plan_for([*MODEL[2:], *EP2, *flags], platform="cpu", host=host, registry=INSTALLED)
    assert "moe-permute-fusion" in made.names


@pytest.mark.parametrize("flags", [(*ZERO, "level1"), ADAPTIVE])
def test_rows_that_are_sent_again_in_the_open_are_noted(flags):
    (said,) = plan(*MODEL, *EP2, *flags).notes
    assert "sends rows again beside gradients of the experts only" in str(said)
    assert plan(*MODEL, *flags).notes == ()


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
def test_every_host_takes_what_crowded_calls_keep(host):
    made, _ = plan_for([*MODEL[2:], *EP2, *ADAPTIVE], platform="cpu", host=host, registry=INSTALLED)
    assert {"moe-adaptive-recompute", "moe-core"} <= set(made.names)


def test_a_loss_that_depends_on_the_layout_is_noted():
    (said,) = plan(*MODEL, *EP2, *BALANCED, "0.1").notes
    assert "with another size another loss is trained; --moe-router-num-groups" in str(said)
    assert plan(*MODEL, *BALANCED, "0.1", "--moe-router-num-groups", "2").notes == ()


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
@pytest.mark.parametrize(
    "flags", [(*BALANCED, "0.1"), ("--moe-comm-aux-loss-coeff", "0.1"), ("--fix-router",)]
)
def test_every_host_takes_the_routers(host, flags):
    made, _ = plan_for([*MODEL[2:], *EP2, *flags], platform="cpu", host=host, registry=INSTALLED)
    assert "moe-core" in made.names


def test_a_number_of_shared_experts_agrees_with_the_width_that_says_the_same():
    width = ("--moe-shared-expert-intermediate-size", "64")
    found = prepared(*MODEL, "--n-shared-experts", "2", *width)
    assert found.args.moe_shared_expert_intermediate_size == 64


def test_a_number_of_shared_experts_sets_their_width():
    assert prepared(*MODEL, "--n-shared-experts", "2").args.moe_shared_expert_intermediate_size == 64


def test_layers_beyond_the_number_keep_all_but_their_activation():
    options = LayerOptions(overlaps=True, saves="level1", saving_layers=3)
    # Two chunks of two layers on a rank: their first layers come before their second ones.
    saved = [options.of_layer(position, chunk, 2) for position in (0, 1) for chunk in (0, 1)]
    assert saved == ["level1", "level1", "level1", "activation"]
    assert LayerOptions(overlaps=True, saves="level0").of_layer(7, 1, 2) == "level0"


ALWAYS = ("moe-alltoall-overlap-distributed-optimizer-overlapped", "moe-alltoall-overlap-one-process")


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, platform="cpu", always=ALWAYS)
)
def test_scenarios(feature, scenario):
    verdict = verify(feature, scenario, platform="cpu")
    assert verdict.passed, str(verdict)
