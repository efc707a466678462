"""Flags of cut experts in groups, and of products that exchange rows: refused with the way out, or noted."""

import pytest

from mindspeed_core.activation import plan_for
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_moe.features.experts_pipeline import GROUPS
from mindspeed_moe.features.fused_products_proofs import PADDED, PLACES, ROWS
from mindspeed_moe.features.proofs import EP2, GATHERED, MODEL, OVERLAP, SHARED, TP2

INSTALLED = Registry.discover()
DEGREE = ("--moe-experts-pipeline-degree",)
WHOLE = ("--expert-tensor-parallel-size", "1")
ACTIVATION = ("--recompute-granularity", "selective", "--recompute-modules", "moe_act")
DEEPSPEED = ("--moe-model-type", "deepspeed_moe", "--moe-aux-loss-coeff", "0")
LEVEL0 = ("--moe-zero-memory", "level0")


def planned(*flags, host="standalone"):
    made, _ = plan_for([*MODEL[2:], *flags], platform="cpu", host=host, registry=INSTALLED)
    return made


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*TP2, *DEGREE, "3"), "--moe-experts-pipeline-degree 3 does not divide the 4 experts of a rank"),
        ((*TP2, *DEGREE, "1"), "--moe-experts-pipeline-degree 1 does not divide the 4 experts"),
        ((*TP2, *EP2, *DEGREE, "4"), "--moe-experts-pipeline-degree 4 does not divide the 2 experts"),
        ((*EP2, *GROUPS), "gathers rows of experts that are cut, and these are whole"),
        ((*TP2, *WHOLE, *GROUPS), "without --expert-tensor-parallel-size 1 and --moe-tp-extend-ep"),
        ((*TP2, *EP2, *GROUPS, *OVERLAP), "layer-schedule"),
        ((*TP2, *GROUPS, *LEVEL0), "its experts keep the results of each group"),
        ((*TP2, *GROUPS, *ACTIVATION), "--recompute-modules moe_act: experts are computed group by group"),
        ((*TP2, *GROUPS, *DEEPSPEED), "--use-pipe-experts pipelines those"),
        ((*TP2, *GROUPS, "--moe-permute-fusion"), "rows are sorted for all experts at once"),
        (
            (*TP2, *GROUPS, "--gemm-gradient-accumulation-fusion"),
            "weight gradients of experts are computed group by group",
        ),
        (ROWS, "--moe-alltoall-mc2 with --expert-model-parallel-size 1 has no exchange"),
        ((*EP2, *ROWS, *PLACES), "are two ways to exchange the same rows; keep one of the two"),
        ((*EP2, *TP2, *ROWS), "--moe-alltoall-mc2 with experts cut over 2 ranks"),
        (
            (*EP2, *ROWS, "--moe-expert-capacity-factor", "1.0"),
            "--moe-alltoall-mc2 with --moe-expert-capacity-factor 1.0: as many rows travel",
        ),
        ((*EP2, *ROWS, *OVERLAP), "layer-schedule"),
        ((*EP2, *ROWS, *LEVEL0), "the exchange is part of a product"),
        ((*EP2, *ROWS, "--moe-zerc"), "the exchange is part of a product"),
        ((*EP2, *ROWS, *ACTIVATION), "the activation stands between two operators"),
        ((*EP2, *ROWS, *DEEPSPEED), "places travel without probabilities"),
        ((*GATHERED[len(MODEL) :], *EP2, *ROWS), "it is the all-to-all that is part of a product"),
        ((*EP2, *TP2, *PLACES), "add --moe-expert-capacity-factor and --moe-pad-expert-input-to-capacity"),
        ((*EP2, *PADDED, *PLACES), "gathers rows of experts that are cut, and these are whole"),
        (
            (*EP2, *SHARED, *ROWS, "--moe-shared-expert-overlap"),
            "--moe-alltoall-mc2 with --moe-shared-expert-overlap: the dispatcher calls no shared experts",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags, message):
    with pytest.raises(PlanError) as error:
        planned(*flags)
    assert message in str(error.value)


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ((*TP2, *GROUPS), "moe-experts-pipeline"),
        ((*EP2, *ROWS), "moe-mc2"),
        ((*EP2, *TP2, *PADDED, *PLACES), "moe-mc2"),
    ],
)
def test_every_host_takes_the_flags(host, flags, name):
    assert {name, "moe-core"} <= set(planned(*flags, host=host).names)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ((*EP2, *ROWS), "on other devices exchange and product run one after the other"),
        ((*EP2, *TP2, *PADDED, *PLACES), "no supported version of torch_npu has these kernels"),
    ],
)
def test_where_no_kernel_joins_exchange_and_product_is_said(flags, note):
    assert any(note in str(said) for said in planned(*flags).notes)
