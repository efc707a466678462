"""Dropout does not depend on who looks: hooks of saved tensors, traced steps, observers of operations."""

import pytest

from mindspeed_testing import run_world
from mindspeed_testing.lagging.planting import PlantedFault
from mindspeed_testing.lagging.runs import Training, outcomes

STEPS = 5
"""Smart swap traces within them."""
MODEL = (
    *("--num-layers", "3", "--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--global-batch-size", "2", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
    # Swapping brings it along; its masks are not those of megatron-core's attention.
    "--use-flash-attn",
)
BYTES = ("--swap-min-bytes", "1")
TRACED = ("--smart-swap", *BYTES)
LOOKED_AT = {
    "saved tensors under hooks": ("--swap-attention", "--swap-modules", "mlp", *BYTES),
    "layers run again": (
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        "1",
    ),
    "a traced step": TRACED,
    "steps that are reported and counted": (
        *("--memory-report", "--memory-report-path", "{folder}/memory"),
        *("--op-cal-tflops", "--peak-tflops", "1"),
        "--log-comm-bytes",
    ),
    "recorded allocations": ("--record-memory-history", "--memory-snapshot-path", "{folder}/history.pickle"),
}
FOLLOWED = PlantedFault(
    "mindspeed_memory.policy.trace",
    "platform.step_bytes() if follows else None",
    "__import__('mindspeed_core.platforms.platform', fromlist=['Platform'])"
    ".Platform.step_bytes(platform) if follows else None",
)
"""Bytes of the traced step are counted by a dispatch mode, as they once were."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looked-at")
    cases = {"nothing": ()}
    cases |= {case: [flag.format(folder=folder) for flag in flags] for case, flags in LOOKED_AT.items()}
    trainings = [Training((*MODEL, *flags), STEPS) for flags in cases.values()]
    followed = Training((*MODEL, *TRACED), STEPS, fault=FOLLOWED)
    (found,) = run_world(outcomes, 1, [*trainings, followed, Training(MODEL, STEPS, platform="cpu")])
    return dict(zip((*cases, "a followed step", "eager dropout"), found))


@pytest.mark.parametrize("case", LOOKED_AT)
def test_the_same_is_dropped_whoever_looks(trained, case):
    assert not trained[case].error, trained[case].error
    assert trained[case] == trained["nothing"]


def test_compiled_dropout_draws_masks_of_its_own(trained):
    assert trained["nothing"].numbers != trained["eager dropout"].numbers


def test_a_step_that_a_dispatch_mode_follows_trains_something_else(trained):
    """smart-swap's traced step on CUDA, before a platform that compiles counted with its allocator."""
    assert not trained["a followed step"].error
    assert trained["a followed step"].numbers != trained["nothing"].numbers
