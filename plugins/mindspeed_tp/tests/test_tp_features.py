"""The declarations: sound, free of heavy imports, refused with flag, value and way out, proved."""

import json

import pytest

from mindspeed_core.activation import plan_for, prepare
from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_testing.declared import declaration_faults
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.verify import verify
from mindspeed_tp.features import DECLARATIONS
from mindspeed_tp.features.grid_proofs import grid
from mindspeed_tp.features.proofs import COC, FULL, MODEL, SP, TP2

FEATURES = declared_features(DECLARATIONS)
INSTALLED = Registry.discover()
LEVEL2 = ("--optimize-recomp-communication-level", "2")
UNEVEN = ("--unaligned-linear",)
HEADS5 = ("--num-attention-heads", "5", "--hidden-size", "40")


def test_declarations_are_sound_light_and_on_their_pages():
    assert declaration_faults("mindspeed_tp.features") == []


def test_nothing_is_patched_but_on_npus_by_one_feature():
    patching = [(feature.name, feature.platforms) for feature in FEATURES if feature.patches]
    assert patching == [("hccl-group-options", ("npu",))]


def plan(*flags, ranks=1):
    line = training_flags(flags, ranks, INSTALLED)
    return prepare(line, platform="cpu", registry=INSTALLED, host="standalone").plan


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ((*COC, "2"), {"coc", "tp-linear"}),
        (("--comm-overlap-type", "coc_kernel"), {"coc", "tp-linear"}),
        (("--comm-overlap-type", "mc2"), {"mc2", "tp-linear"}),
        ((*FULL, *LEVEL2), {"recompute-comm", "tp-linear"}),
        ((*FULL, "--optimize-recompute-communication-level", "1"), {"recompute-comm"}),
        ((*FULL, "--optimize-recomp-communication-status", "1"), {"recompute-comm"}),
        (("--tp-2d", "--tp-x", "1", "--tp-y", "2"), {"tp-2d", "tp-linear"}),
        (("--use-nd-matmul", "--nd1-dim1-size", "2", "--nd2-dim1-size", "1"), {"tp-2d"}),
        (("--lm-loss-chunks", "2"), {"chunked-lm-loss"}),
        (("--use-distributed-optimizer", "--disable-gloo-group"), {"hccl-replace-gloo"}),
        ((), {"vocab-parallel"}),
    ],
)
def test_every_host_takes_the_flags(host, flags, names):
    sizes = ("--seq-length", "16", "--micro-batch-size", "2", "--num-layers", "2", "--hidden-size", "64")
    made, _ = plan_for(
        [*MODEL[2:], *sizes, "--num-attention-heads", "4", "--ffn-hidden-size", "128", *TP2, *flags],
        platform="cpu",
        host=host,
        registry=INSTALLED,
    )
    assert names <= set(made.names)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*TP2, *COC, "3"), "--coc-parallel-num"),
        ((*TP2, *COC, "2", "--use-ascend-mc2"), "both execute the same products"),
        ((*TP2, *LEVEL2), "add --recompute-granularity full"),
        (
            (*TP2, *LEVEL2, "--recompute-granularity", "selective"),
            "it is full recomputation whose communication it saves",
        ),
        (
            (*TP2, *FULL, *LEVEL2, "--distribute-saved-activations"),
            "inputs of segments are saved whole; drop one of the two",
        ),
        (
            (*grid(2, 2)[:2], "--tp-2d", "--tp-x", "2", "--tp-y", "1"),
            "--tp-x 2 times --tp-y 1 is not --tensor-model-parallel-size 4; use factors of 4",
        ),
        (
            (*grid(2, 2)[:2], "--use-nd-matmul", "--nd1-dim1-size", "2", "--nd2-dim1-size", "4"),
            "are two grids of the 4 ranks",
        ),
        (
            (*grid(2, 2), "--group-query-attention", "--num-query-groups", "2"),
            "--num-query-groups 2 is no multiple of 4 (--tp-x 2 times --tp-y 2); use a multiple of 4",
        ),
        ((*grid(1, 2), "--seq-length", "15"), "--seq-length 15 is no multiple of 2 (--context-parallel"),
        (
            (*grid(1, 4), "--hidden-size", "90", "--num-attention-heads", "4", "--kv-channels", "16"),
            "--hidden-size 90 is no multiple of 4 (--tp-y 4); use a multiple of 4",
        ),
        (
            (*grid(4, 1), "--ffn-hidden-size", "130"),
            "--ffn-hidden-size 130 is no multiple of 4 (--tp-x 4); use a multiple of 4",
        ),
        (
            (*grid(2, 2), "--num-attention-heads", "2"),
            "--num-attention-heads 2 is no multiple of 4 (--tp-x 2 times --tp-y 2); use a multiple of 4",
        ),
        ((*grid(1, 2), "--num-experts", "4"), "experts are not cut in two dimensions"),
        ((*grid(1, 2), "--multi-latent-attention"), "down-projections are whole on every rank"),
        ((*grid(1, 2), *COC, "2", "--enable-overlap-ag-with-matmul"), "execute the same products; keep one"),
        ((*grid(1, 2), *UNEVEN), "a grid divides every dimension"),
        ((*TP2, *HEADS5, *UNEVEN, "--use-ascend-mc2"), "its kernels take equal parts; use --use-ascend-coc"),
        ((*TP2, *UNEVEN, "--num-experts", "4"), "experts are distributed evenly"),
        ((*TP2, *UNEVEN, "--multi-latent-attention"), "down-projections are whole on every rank"),
        ((*TP2, *UNEVEN, "--context-parallel-size", "2"), "its ranks exchange equal parts; drop one"),
        (
            (*TP2, *UNEVEN, "--group-query-attention", "--num-query-groups", "1"),
            "1 query groups leave some of 2 ranks without any; lower --tensor-model-parallel-size",
        ),
        (
            (*TP2, *SP, *UNEVEN, "--seq-length", "15", "--position-embedding-type", "learned_absolute"),
            "learned positions are scattered evenly over 2 ranks; use --position-embedding-type rope",
        ),
        (("--async-log-allreduce", "--check-for-spiky-loss"), "it looks at the loss before the update"),
        (("--async-log-allreduce", "--bad-step-action", "skip"), "it looks at the loss before the update"),
        (("--hccl-slice-size", "1000"), "it is the state of the distributed optimizer that is gathered"),
        (
            ("--use-distributed-optimizer", "--hccl-slice-size", "0"),
            "--hccl-slice-size 0: a slice has at least one element; use a positive number",
        ),
        (("--lm-loss-chunks", "3"), "--lm-loss-chunks 3 does not divide the"),
        (
            ("--lm-loss-chunks", "2", "--cross-entropy-loss-fusion"),
            "it takes the logits of the whole sequence",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags, message):
    with pytest.raises(PlanError) as error:
        plan(*MODEL, *flags, ranks=4)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ((*COC, "2"), "no effect: there is no communication to hide with --tensor-model-parallel-size 1"),
        ((*TP2, "--use-ascend-coc", "--coc-fused-kernel"), "rows are worked on in 4 parts"),
        ((*TP2, "--use-ascend-mc2"), "no kernel that communicates"),
        (("--use-distributed-optimizer", "--disable-gloo-group"), "only formats that gather its state"),
        (("--mlp-layer-fusion",), "--mlp-layer-fusion has no effect"),
        (
            grid(1, 4),
            "communicates more than one dimension, in units of the hidden state per layer: 4x1 3.000",
        ),
        ((*grid(2, 1), *SP), "--sequence-parallel is absorbed"),
        (
            (
                "--tensor-model-parallel-size",
                "4",
                *UNEVEN,
                "--num-attention-heads",
                "25",
                "--hidden-size",
                "100",
            ),
            "25 heads on 4 ranks: 12 % idle",
        ),
    ],
)
def test_what_is_good_to_know_is_noted(flags, note):
    assert any(note in str(said) for said in plan(*MODEL, *flags, ranks=4).notes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no object"),
        ('{"64 x 3": 2}', "has the key '64 x 3', which is no shape; write '[m, k, n]'"),
        ('{"[64, 64, 96]": 3}', "gives [64, 64, 96] 3 parts; use one of 1, 2, 4, 8"),
        ('{"[1, 2, 3]": 2}', "names [1, 2, 3], which no product of this model has"),
    ],
)
def test_a_file_of_parts_that_cannot_be_used_is_refused(tmp_path, content, message):
    path = tmp_path / "coc.json"
    path.write_text(content)
    with pytest.raises(PlanError) as error:
        plan(*MODEL, *TP2, "--use-ascend-coc", "--coc-config", str(path), ranks=2)
    assert message in str(error.value)


def test_a_file_gives_parts_to_the_shapes_it_names(tmp_path):
    path = tmp_path / "coc.json"
    path.write_text(json.dumps({"[32, 64, 96]": 8}))
    flags = (*TP2, *SP, "--use-ascend-coc", "--coc-config", str(path), "--seq-length", "16")
    line = training_flags((*MODEL, *flags, "--micro-batch-size", "2"), 2, INSTALLED)
    session = prepare(line, platform="cpu", registry=INSTALLED, host="standalone")
    from mindspeed_tp.options import linear_plans

    execution = linear_plans(session.args, session.plan.names).column.gather
    assert execution.parts_of((32, 64, 96)) == 8
    assert execution.parts_of((32, 64, 128)) == 1


def test_attention_is_placed_before_the_grid_puts_its_exchanges_around_it():
    names = plan(*MODEL, *grid(1, 2), "--use-flash-attn", ranks=2).names
    assert names.index("tp-2d") < names.index("flash-attn")


@pytest.mark.parametrize("flag", ["--unaligned-linear", "--async-log-allreduce"])
def test_a_loop_of_ones_own_refuses_what_only_a_host_can_do(flag):
    with pytest.raises(PlanError) as error:
        plan_for([*MODEL[2:], *TP2, flag], platform="cpu", host="library", registry=INSTALLED)
    assert flag in str(error.value)


ALWAYS = ("tp-2d-2x2", "unaligned-linear-resume")


@pytest.mark.parametrize(
    ("feature", "scenario"), scenario_parameters(DECLARATIONS, platform="cpu", always=ALWAYS)
)
def test_scenarios(feature, scenario):
    verdict = verify(feature, scenario, platform="cpu")
    assert verdict.passed, str(verdict)
