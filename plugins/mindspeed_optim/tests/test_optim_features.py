"""The declarations: sound, free of heavy imports, refused with flag, value and way out, proved."""

import pytest

from mindspeed_core.activation import plan_for, prepare
from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.validation import check
from mindspeed_optim.features import DECLARATIONS
from mindspeed_testing.declared import declaration_faults
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.verify import verify

FEATURES = declared_features(DECLARATIONS)
INSTALLED = Registry.discover()
MUON = ("--optimizer", "muon")
SHARDED = ("--use-distributed-optimizer",)
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
AWARE = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--bf16")
PLACED = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-token-dispatcher-type", "alltoall"),
    *("--enable-expert-placement", "--expert-model-parallel-size", "2"),
)
ALWAYS = ("opt-muon-tp2-dp2", "opt-muon-resume-tp2")


def test_declarations_are_sound_light_and_on_their_pages():
    assert declaration_faults("mindspeed_optim.features") == []


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
@pytest.mark.parametrize("value", ["fused_adam", "muon", "dist_muon"])
def test_every_host_takes_the_optimizers(host, value):
    flags = ["--optimizer", value, "--transformer-impl", "local"]
    made, parsed = plan_for(flags, platform="cpu", host=host, registry=INSTALLED)
    assert any(name.startswith("opt-") for name in made.names)
    # In a library session the optimizer is the caller's, sharded or not.
    sharded = getattr(parsed.args, "use_distributed_optimizer", None)
    assert host == "library" or sharded == (value == "dist_muon")


def problems(*flags, world_size=2):
    found = check(training_flags(flags, 1, INSTALLED), world_size=world_size, registry=INSTALLED)
    return "\n".join(map(str, found.problems))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((*MUON, "--fp16"), ["--fp16", "opt-muon", "use --bf16"]),
        ((*MUON, "--use-torch-fsdp2"), ["--use-torch-fsdp2", "--use-distributed-optimizer"]),
        ((*MUON, *SHARDED, "--use-megatron-fsdp"), ["--use-megatron-fsdp", "opt-muon"]),
        ((*MUON, "--muon-num-ns-steps", "6"), ["--muon-num-ns-steps 6", "multiple of 5", "give"]),
        (
            (*MUON, "--muon-coefficient-type", "polar_express"),
            ["--muon-num-ns-steps 5", "polar_express", "--muon-num-ns-steps 8"],
        ),
        ((*MUON, "--muon-momentum", "1.0"), ["--muon-momentum 1.0", "below 1"]),
        ((*MUON, "--muon-extra-scale-factor", "0"), ["--muon-extra-scale-factor 0.0", "above 0"]),
        ((*MUON, "--lion-beta2", "-1"), ["--lion-beta2 -1.0"]),
        ((*MUON, "--unaligned-linear"), ["unaligned-linear", "equal parts"]),
        ((*MUON, *TP2, "--tp-2d", "--tp-x", "2", "--tp-y", "1"), ["tp-2d", "opt-muon", "both dimensions"]),
        ((*MUON, *PP2, "--pipeline-schedule", "chimera"), ["pp-chimera", "opt-muon", "copies of a pipeline"]),
        ((*MUON, *PLACED), ["moe-expert-placement", "--optimizer"]),
        ((*MUON, "--optimizer-cpu-offload"), ["--optimizer-cpu-offload", "opt-muon", "on the host"]),
        ((*MUON, *SHARDED, *AWARE), ["--use-precision-aware-optimizer", "opt-muon"]),
        (
            (*MUON, *SHARDED, "--num-distributed-optimizer-instances", "2"),
            ["--optimizer muon", "--num-distributed-optimizer-instances 2", "leave it at 1"],
        ),
        ((*MUON, "--reuse-fp32-param", "--bf16"), ["block-optimizer", "--optimizer"]),
        (
            (*MUON, "--optimizer-selection", "fused_adamw"),
            ["--optimizer-selection fused_adamw", "--optimizer is muon"],
        ),
        (
            ("--optimizer", "sgd", "--optimizer-selection", "fused_adamw"),
            ["--optimizer-selection fused_adamw", "--optimizer is sgd"],
        ),
        (("--optimizer", "fused_adam", "--use-fused-adam"), ["optimizer", "fused-adam"]),
        (("--zero-stage", "3", *PP2), ["--zero-stage 3", "--pipeline-model-parallel-size 2", "stage 1"]),
        (("--zero-stage", "2", *PP2), ["--zero-stage 2", "--pipeline-model-parallel-size 2", "stage 1"]),
        (("--zero-stage", "0", *SHARDED), ["--zero-stage 0", "--use-distributed-optimizer"]),
        (
            ("--zero-stage", "3", "--data-parallel-sharding-strategy", "optim"),
            ["--zero-stage 3", "optim_grads_params", "it is optim"],
        ),
        (("--quant-grads", *SHARDED), ["--quant-grads", "--bf16"]),
        (("--quant-grads", "--bf16"), ["--quant-grads", "--use-distributed-optimizer"]),
        (
            ("--quant-grads", "--bf16", *SHARDED, "--accumulate-allreduce-grads-in-fp32"),
            ["--accumulate-allreduce-grads-in-fp32", "opt-quant-grads"],
        ),
        (
            ("--optimizer", "fused_adam", "--optimizer-cpu-offload"),
            ["--optimizer-cpu-offload", "opt-fused-adamw"],
        ),
        (("--layerzero",), ["--layerzero", "--use-torch-fsdp2"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_go_is_refused_with_the_way_out(flags, named):
    said = problems(*flags)
    for text in named:
        assert text in said


def test_an_update_by_chunks_is_refused_in_the_host_that_makes_one():
    flags = [*MUON, *SHARDED, "--overlap-param-gather-with-optimizer-step", "--transformer-impl", "local"]
    with pytest.raises(PlanError) as caught:
        plan_for(flags, platform="cpu", host="megatron-lm", registry=INSTALLED)
    assert "--overlap-param-gather-with-optimizer-step" in str(caught.value)
    assert "matrices meet in one step" in str(caught.value)
    # The other one updates all chunks together, whatever the flag says.
    assert problems(*MUON, *SHARDED, "--overlap-param-gather-with-optimizer-step") == ""


def test_fewer_groups_of_heads_than_ranks_need_the_whole_matrix():
    few = (*MUON, "--group-query-attention", "--num-query-groups", "1", *TP2)
    assert "use --muon-tp-mode duplicated, or --muon-no-split-qkv" in problems(*few)
    assert problems(*few, "--muon-tp-mode", "duplicated") == ""


def plan(*flags):
    return prepare(
        training_flags(flags, 1, INSTALLED), platform="cpu", registry=INSTALLED, host="standalone"
    ).plan


def test_what_depends_on_the_layout_is_noted():
    said = "".join(map(str, plan(*MUON, *TP2).notes))
    assert "another --tensor-model-parallel-size trains another model" in said
    assert not plan(*MUON, *TP2, "--muon-tp-mode", "distributed").notes


@pytest.mark.parametrize("flag", [("--param-and-grad-buffer-pad", "512"), ("--reset-bucket-group-order",)])
def test_flags_that_change_nothing_are_noted(flag):
    assert problems(*flag) == ""
    assert any(flag[0] in str(note) for note in plan(*flag).flag_notes)


def test_one_rule_serves_both_names_of_the_kernel():
    for value in ("fused_adamw", "fused_torch_adamw"):
        assert "opt-fused-adamw" in plan("--optimizer-selection", value).names


def test_the_block_wise_optimizer_is_told_the_kernel():
    names = plan("--optimizer", "fused_adam", "--bf16", "--reuse-fp32-param").names
    assert {"opt-fused-adamw", "block-optimizer"} <= set(names)


def test_a_session_without_the_flags_registers_nothing():
    session = prepare(training_flags((), 1, INSTALLED), platform="cpu", registry=INSTALLED, host="standalone")
    names = {feature.name for feature in FEATURES}
    assert not names & set(session.plan.names)
    with session:
        for stage in ("build_optimizer_config", "build_optimizer", "optimizer_step", "train_step"):
            assert not names & set(session.implementations(stage))


@pytest.mark.parametrize(("feature", "scenario"), scenario_parameters(DECLARATIONS, always=ALWAYS))
def test_scenarios(feature, scenario):
    verdict = verify(feature, scenario)
    assert verdict.passed, str(verdict)
