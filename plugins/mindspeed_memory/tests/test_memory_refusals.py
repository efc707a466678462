"""Flags that exclude each other, and limits that are too low: one problem, both flags, the reason."""

import pytest

from mindspeed_core.activation import plan_for
from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.validation import check
from mindspeed_memory.features import DECLARATIONS
from mindspeed_memory.features.proofs import BLOCK, FSDP2, INTERLEAVED, MEGATRON_FSDP
from mindspeed_testing.model_flags import training_flags

INSTALLED = Registry.discover()
BF16, FLASH = ("--bf16",), ("--use-flash-attn",)
UNIFORM = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
FP8 = ("--fp8-format", "hybrid")
PIPELINE = ("--pipeline-model-parallel-size", "2")
OFFLOADED = ("--fine-grained-activation-offloading", "--offload-modules")
TO_HOST = ("--cpu-offloading-num-layers", "2")
LAYERS = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
ACTIVATION, NORM = "--recompute-activation-function", "--recompute-norm"
PER_RANK, ADVANCE, BUBBLE = (
    "--enable-recompute-layers-per-pp-rank",
    "--recompute-in-advance",
    "--recompute-in-bubble",
)
ATTENTION, INPUT = "--swap-attention", "--swap-layer-input"
COMPRESS, DENSE = "--compress-activation", "--compress-dense"
REUSE, RELEASE, SWAP, VIRTUAL, COMPRESSED = (
    "--reuse-fp32-param",
    "--release-fp32-grad",
    "--swap-optimizer",
    "--virtual-optimizer",
    "--compress-optimizer",
)
PLANS = ("--recompute-plan", "--swap-activation-plan")
ADAPTIVE, MEMORY, SMART = (
    "--adaptive-recompute-device-swap",
    "--adaptive-memory-optimization",
    "--smart-swap",
)

EXCLUDED = [
    (ACTIVATION, "--recompute-method", UNIFORM, "no layer is left"),
    (ACTIVATION, "--recompute-modules mlp", (*SELECTIVE, "mlp", "--disable-bias-linear"), "redundant"),
    (ACTIVATION, DENSE, (*BF16, DENSE, "level0"), "slot mlp-forward"),
    (ACTIVATION, COMPRESS, (*BF16, COMPRESS, "0"), "dropped would be compressed first"),
    (ACTIVATION, "--fp8-format", FP8, "state of their own"),
    (NORM, "--recompute-method", UNIFORM, "no layer is left"),
    (NORM, "--recompute-modules layernorm", (*SELECTIVE, "layernorm"), "redundant"),
    (NORM, COMPRESS, (*BF16, COMPRESS, "0"), "dropped would be compressed first"),
    (NORM, "--fp8-format", FP8, "state of their own"),
    (PER_RANK, "--recompute-method", UNIFORM, "there is no number to count"),
    (BUBBLE, "--recompute-granularity", (*INTERLEAVED, *LAYERS), "both say what is computed again"),
    (BUBBLE, "--recompute-granularity", (*INTERLEAVED, *SELECTIVE, "core_attn"), "both say what"),
    (BUBBLE, ATTENTION, (*INTERLEAVED, *FLASH, ATTENTION), "put away at once"),
    (BUBBLE, COMPRESS, (*INTERLEAVED, *BF16, COMPRESS, "0"), "put away at once"),
    (BUBBLE, DENSE, (*INTERLEAVED, *BF16, DENSE, "level0"), "put away at once"),
    (BUBBLE, PLANS[0], (*INTERLEAVED, PLANS[0], "decoder.layers.{*}"), "slot recompute-policy"),
    (BUBBLE, PLANS[1], (*INTERLEAVED, PLANS[1], "decoder.layers.{*}"), "put away at once"),
    (BUBBLE, "--fp8-format", (*INTERLEAVED, *FP8), "state of their own"),
    (ADVANCE, "--recompute-method", (*INTERLEAVED, *UNIFORM), "use block"),
    (ADVANCE, "--recompute-granularity", (*INTERLEAVED, *SELECTIVE[:2], *LAYERS[2:]), "whole layers"),
    (ADVANCE, ATTENTION, (*INTERLEAVED, *LAYERS, *FLASH, ATTENTION), "put away at once"),
    (ADVANCE, INPUT, (*INTERLEAVED, *LAYERS, INPUT), "put away at once"),
    (ADVANCE, "--fp8-format", (*INTERLEAVED, *LAYERS, *FP8), "state of their own"),
    (REUSE, SWAP, (*BF16, SWAP), "slot optimizer-master"),
    (REUSE, "--fp8-param-gather", (*BF16, *FP8, "--fp8-param-gather"), "weights of 8 bits"),
    (REUSE, "--optimizer-cpu-offload", (*BF16, "--optimizer-cpu-offload"), "does not find it"),
    (REUSE, "--bf16", ("--fp16",), "upper half of a float32 number"),
    (REUSE, "--use-torch-fsdp2", (*BF16, "--use-torch-fsdp2"), "as parts of its own"),
    (RELEASE, "--optimizer", (*BF16, "--grad-reduce-in-bf16", "--optimizer", "sgd"), "update is AdamW's"),
    (ATTENTION, INPUT, (*FLASH, *LAYERS, INPUT), "slot saved-tensors"),
    (ATTENTION, PLANS[1], (*FLASH, PLANS[1], "decoder.layers.{*}"), "slot saved-tensors"),
    (ATTENTION, COMPRESS, (*FLASH, *BF16, COMPRESS, "0"), "slot saved-tensors"),
    (ATTENTION, DENSE, (*FLASH, *BF16, DENSE, "level0"), "slot saved-tensors"),
    (INPUT, "--recompute-granularity", (), "computed again whose input"),
    (INPUT, "--distribute-saved-activations", (*LAYERS, "--distribute-saved-activations"), "cuts the inputs"),
    (SWAP, VIRTUAL, (*BF16, VIRTUAL, "all"), "slot optimizer-state"),
    (SWAP, COMPRESSED, (*BF16, COMPRESSED), "slot optimizer-state"),
    (VIRTUAL, COMPRESSED, (*BF16, COMPRESSED), "slot optimizer-state"),
    (COMPRESS, DENSE, (*BF16, DENSE, "level0"), "slot saved-tensors"),
    (COMPRESS, "--recompute-granularity", (*BF16, *LAYERS), "nothing that could be compressed"),
    (COMPRESS, "--bf16", (), "exponents of bfloat16"),
    (DENSE, "--recompute-granularity", (*BF16, *LAYERS), "nothing that could be compressed"),
    (COMPRESSED, "--optimizer", (*BF16, "--optimizer", "sgd"), "update is AdamW's"),
    (PLANS[0], "--recompute-granularity", LAYERS, "both say what is computed again"),
    (BUBBLE, ADAPTIVE, (*INTERLEAVED, ADAPTIVE), "slot recompute-policy"),
    (BUBBLE, MEMORY, (*INTERLEAVED, MEMORY), "slot recompute-policy"),
    (BUBBLE, SMART, (*INTERLEAVED, SMART), "slot recompute-policy"),
    (ADVANCE, SMART, (*INTERLEAVED, *LAYERS, SMART), "slot recompute-policy"),
    (ADVANCE, PLANS[1], (*INTERLEAVED, *LAYERS, PLANS[1], "decoder.layers.{*}"), "put away at once"),
    (SMART, ATTENTION, (*FLASH, ATTENTION), "slot saved-tensors"),
    (SMART, COMPRESS, (*BF16, COMPRESS, "0"), "slot saved-tensors"),
    (SMART, "--fp8-format", FP8, "no plain storages"),
    (ADAPTIVE, "--fp8-format", FP8, "state of their own"),
    (MEMORY, "--fp8-format", FP8, "state of their own"),
]
VALUES = {VIRTUAL: ("all",), COMPRESS: ("0",), DENSE: ("level0",), PLANS[0]: ("decoder.layers.{*}",)}


@pytest.mark.parametrize(("flag", "other", "flags", "reason"), EXCLUDED)
def test_one_problem_names_both_flags_and_the_reason(flag, other, flags, reason):
    line = training_flags((flag, *VALUES.get(flag, ()), *flags), 1, INSTALLED)
    with pytest.raises(PlanError) as caught:
        plan_for(line, platform="cpu", host="standalone", registry=INSTALLED)
    said = str(caught.value)
    assert said.startswith("1 problem with these arguments"), said
    assert all(word in said for word in (flag, other, reason)), said


@pytest.mark.parametrize(
    ("flag", "flags", "reason"),
    [
        (PLANS[0], (*OFFLOADED, "attn_norm"), "empties inputs of modules"),
        (BUBBLE, (*INTERLEAVED, *OFFLOADED, "attn_norm"), "empties inputs of modules"),
        (ADVANCE, (*INTERLEAVED, *LAYERS, *OFFLOADED, "attn_norm"), "empties inputs of modules"),
        (PER_RANK, (*LAYERS, *OFFLOADED, "attn_norm"), "empties inputs of modules"),
        (ATTENTION, (*FLASH, *OFFLOADED, "attn_norm"), "moves the same tensors"),
        (ATTENTION, (*FLASH, *TO_HOST), "moves the same tensors"),
        (SMART, TO_HOST, "moves the same tensors"),
        (COMPRESS, (*BF16, *TO_HOST), "moves the same tensors"),
        (NORM, TO_HOST, "dropped and computed again"),
        (ACTIVATION, TO_HOST, "dropped and computed again"),
        (PLANS[0], TO_HOST, "dropped and computed again"),
    ],
)
def test_other_offloading_in_megatron_lm_is_refused_where_storages_are_emptied(flag, flags, reason):
    line = training_flags((flag, *VALUES.get(flag, ()), *flags), 1, INSTALLED)
    with pytest.raises(PlanError) as caught:
        plan_for(line, platform="cpu", host="megatron-lm", registry=INSTALLED)
    said = str(caught.value)
    assert said.startswith("1 problem with these arguments"), said
    assert all(word in said for word in (flag, "offloading", reason)), said


def test_what_drops_results_goes_with_offloading_which_asks_about_them():
    line = training_flags((NORM, ACTIVATION, *OFFLOADED, "attn_norm"), 1, INSTALLED)
    plan, _ = plan_for(line, platform="cpu", host="megatron-lm", registry=INSTALLED)
    assert "recompute-norm" in plan


OPTIONS = {
    "--pipeline-recompute": "pp-engine",
    "--pipeline-memory-limit 3": "pp-engine",
    "--pipeline-w-placement greedy": "pp-engine",
    "--dualpipev-dw-detach": "pp-engine",
    "--use-multi-stream": "pp-engine",
    "--swap-modules mlp": "swap-attention",
    "--swap-optimizer-times 4": "swap-optimizer",
    "--reuse-fp32-ties sign": "reuse-fp32-param",
    "--swap-min-bytes 7": "swap-attention",
    "--swap-prefetch-depth 3": "swap-attention",
    "--swap-host-limit-gb 1": "smart-swap",
    "--compress-min-elements 5": "compress-dense",
    "--memory-report-path reports": "memory-report",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_without_its_switch_says_what_to_add(option):
    line = training_flags((*PIPELINE, *option.split()), 1, INSTALLED)
    plan, _ = plan_for(line, platform="cpu", host="standalone", registry=INSTALLED)
    (said,) = (note.text for note in plan.notes if option.split()[0] in note.text)
    assert all(word in said for word in ("has no effect", OPTIONS[option], "add --")), said


@pytest.mark.parametrize("chunks", ["--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual"])
@pytest.mark.parametrize(("layers", "held"), [("4", ["recompute-norm"]), ("8", [])])
def test_numbers_of_whole_layers_are_those_of_a_chunk(chunks, layers, held):
    per = {"--num-layers-per-virtual": ("--num-layers-per-virtual-pipeline-stage", str(int(layers) // 4))}
    flags = (*PIPELINE, *per.get(chunks, (chunks, "2")), *LAYERS, NORM, "--num-layers", layers)
    line = training_flags(flags, 1, INSTALLED)
    plan, _ = plan_for(line, platform="cpu", host="standalone", registry=INSTALLED)
    assert [one.name for one in plan.held_back] == held


@pytest.mark.parametrize(
    ("flags", "feature", "reason"),
    [
        ((*SELECTIVE, "moe", ACTIVATION), "recompute-activation", "--recompute-modules moe"),
        ((*BF16, DENSE, "level0"), "compress-dense", "every layer has experts"),
        (
            (
                *("--moe-token-dispatcher-type", "alltoall", "--moe-zero-memory", "level1"),
                "--moe-adaptive-recompute-activation",
            ),
            "moe-adaptive-recompute",
            "--moe-zero-memory level1 keeps the least",
        ),
    ],
)
def test_what_experts_leave_nothing_for_is_held_back(flags, feature, reason):
    experts = ("--num-experts", "4", "--moe-grouped-gemm", "--disable-bias-linear", "--swiglu")
    plan, _ = plan_for(
        training_flags((*experts, *flags), 1, INSTALLED),
        platform="cpu",
        host="standalone",
        registry=INSTALLED,
    )
    (held,) = plan.held_back
    assert held.name == feature
    assert reason in held.reason


FEATURES = declared_features(DECLARATIONS)


_NOT_WITH_FSDP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


@pytest.mark.parametrize("sharded", [FSDP2, MEGATRON_FSDP], ids=["fsdp2", "megatron-fsdp"])
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_fully_sharded_parameters_are_served_with_a_proof_or_refused(feature, sharded):
    if any(sharded[0] in scenario.flags for scenario in feature.verify):
        return
    flags = [flag for flag in feature.verify[0].flags if flag not in _NOT_WITH_FSDP]
    line = training_flags((*flags, *sharded), 1, INSTALLED)
    found = check(line, platform="cpu", host="standalone", world_size=2, registry=INSTALLED)
    assert sharded[0] in " ".join(str(problem) for problem in found.problems)


MIB = 2**20
LARGE = ("--seq-length", "1024", "--micro-batch-size", "2", "--global-batch-size", "16")
EIGHT = ("--num-layers", "8")
SIZED = (*LARGE, *EIGHT, "--hidden-size", "256", "--num-attention-heads", "4")


def limited(gib, *flags, world=1):
    line = training_flags((*SIZED, *flags, "--swap-host-limit-gb", f"{gib:.6g}"), 1, INSTALLED)
    found = check(line, platform="cpu", host="standalone", world_size=world, registry=INSTALLED)
    return " ".join(str(problem) for problem in found.problems)


PP2 = ("--pipeline-model-parallel-size", "2")
FULL = (*BLOCK, "8", INPUT)
SWAPPED = (*FLASH, ATTENTION)
# Query, key and value, and the output; 2 MiB are an input of a layer.
NEEDS = [
    (SWAPPED, 1, 7 * 8 * MIB),
    ((*SWAPPED, *PP2), 2, 2 * 4 * 8 * MIB),
    ((*SWAPPED, *PP2, "--num-layers-per-virtual-pipeline-stage", "2"), 2, 5 * 2 * 8 * MIB),
    ((*SWAPPED, "--bf16"), 1, 7 * 4 * MIB),
    ((*SWAPPED, "--tensor-model-parallel-size", "2"), 2, 7 * 4 * MIB),
    ((*SWAPPED, "--swap-min-bytes", str(3 * MIB)), 1, 7 * 6 * MIB),
    (FULL, 1, 7 * 2 * MIB),
    ((*FULL, *PP2), 2, 2 * 4 * 2 * MIB),
]


@pytest.mark.parametrize(("flags", "world", "need"), NEEDS)
def test_a_limit_below_what_is_swapped_is_refused_before_the_start(flags, world, need):
    said = limited(need * 0.999 / 2**30, *flags, world=world)
    assert "--swap-host-limit-gb" in said, said
    assert "raise it, swap fewer layers, or use smaller micro-batches" in said
    assert limited(need * 1.001 / 2**30, *flags, world=world) == ""
