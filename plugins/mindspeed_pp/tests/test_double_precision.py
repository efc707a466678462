"""Orders of summation apart: schedules in float64, where rounding hides no fault.

In float32 a schedule that adds the gradients of micro-batches in another order, or cuts a batch otherwise,
differs by some 1e-6 from one process, as would a small fault. In float64 the same difference is 1e-15.
"""

import pytest
import torch
from trained import PP2, PP4, UNTIED, distance, set_up, trained

from mindspeed_core.feature import hookimpl
from mindspeed_testing import run_world
from mindspeed_testing.canonical import canonical_parameters

TOLERANCE = 1e-12
SPLIT_LOSS = 1e-7
"""Of a vocabulary in parts, whose sums of the loss are float32."""
CHIMERA = ("--pipeline-schedule", "chimera")
NANO = ("--num-virtual-stages-per-pipeline-rank", "2", "--use-nanopipe")
TWELVE = ("--global-batch-size", "12")
LIST = ("--micro-batch-size", "2", "--optimized-mbs-list", "1,2,3,3,2,1")
PER_TOKEN = ("--calculate-per-token-loss",)
MODELS = {
    "": (),
    "untied": (UNTIED,),
    "tokens": PER_TOKEN,
    "whole batch": (*TWELVE, "--micro-batch-size", "12"),
    "whole batch, tokens": (*TWELVE, "--micro-batch-size", "12", *PER_TOKEN),
    "whole batch, untied": (*TWELVE, "--micro-batch-size", "12", UNTIED),
}
"""What one process trains."""
CASES = {
    "nanopipe": ("", 2, (*PP2, *NANO)),
    "chimera": ("", 2, (*PP2, *CHIMERA)),
    "list": ("whole batch", 2, (*PP2, *LIST)),
    "list, tokens": ("whole batch, tokens", 2, (*PP2, *LIST, *PER_TOKEN)),
    "nanopipe, swapped": ("", 2, (*PP2, *NANO, "--use-nanopipe-swap")),
    "nanopipe, tokens": ("tokens", 2, (*PP2, *NANO, *PER_TOKEN)),
    "chimera, decoupled": ("", 2, (*PP2, *CHIMERA, "--chimera-decouple-bw")),
    "chimera, untied": ("untied", 2, (*PP2, *CHIMERA, UNTIED)),
    "chimera, tokens": ("tokens", 2, (*PP2, *CHIMERA, *PER_TOKEN)),
    "list, zbv": ("whole batch, untied", 2, (*PP2, *LIST, UNTIED, "--pipeline-schedule", "zbv")),
    "list by hand": (
        "whole batch",
        2,
        (*PP2, "--micro-batch-size", "2", "--optimized-pipeline", "--manual-mbs", "1,3,4,3,1"),
    ),
    "list, searched": ("whole batch", 2, (*PP2, "--micro-batch-size", "3", "--automated-pipeline-perf")),
    "chimera on four ranks": ("", 4, (*PP4, *CHIMERA)),
    "four copies": ("", 4, (*PP4, *CHIMERA, "--virtual-data-parallel-size", "4")),
    "chimera beside data parallelism": ("", 4, (*PP2, *CHIMERA)),
    "nanopipe beside data parallelism": ("", 4, (*PP2, *NANO)),
    "list beside data parallelism": (
        "whole batch",
        4,
        (*PP2, "--micro-batch-size", "2", "--optimized-mbs-list", "1,2,2,1"),
    ),
    "list beside tensor parallelism": (
        "whole batch",
        4,
        (*PP2, *LIST, "--tensor-model-parallel-size", "2", "--sequence-parallel"),
    ),
}
FIRST = 4


class Double:
    """Computes in float64, except for megatron-core's loss of a token, which is float32 on all layouts."""

    @hookimpl(wrapper=True)
    def build_transformer_config(self):
        config = yield
        config.params_dtype = config.pipeline_dtype = torch.float64
        return config

    @hookimpl(wrapper=True)
    def build_model(self):
        chunks = yield
        for chunk in chunks:
            chunk.double()
        return chunks


def alone(models):
    found = {}
    for model in models:
        with set_up(*MODELS[model], probes=(Double(),)) as run:
            found[model] = canonical_parameters(run), trained(run, 1)
    return found


def together(cases, initial):
    found = {}
    for case in cases:
        model, _, flags = CASES[case]
        whole = TWELVE if model.startswith("whole batch") else ()
        with set_up(*whole, *flags, initial=initial[model], probes=(Double(),)) as run:
            found[case] = trained(run, 1)
    return found


@pytest.fixture(scope="module")
def found(asked_for):
    asked = [case for case in CASES if case in asked_for("case")]
    references = run_world(alone, 1, sorted({CASES[case][0] for case in asked}))[0]
    initial = {model: state for model, (state, _) in references.items()}
    results = {}
    for ranks in sorted({CASES[case][1] for case in asked}):
        of_size = [case for case in asked if CASES[case][1] == ranks]
        results |= run_world(together, ranks, of_size, initial, timeout=280)[0]
    return {case: (result, references[CASES[case][0]][1]) for case, result in results.items()}


@pytest.mark.parametrize(
    "case",
    [case if n < FIRST else pytest.param(case, marks=pytest.mark.thorough) for n, case in enumerate(CASES)],
)
def test_nothing_but_rounding_tells_it_from_one_process(found, case):
    result, reference = found[case]
    assert all(tensor.dtype is torch.float64 for tensor in result.gradients.values())
    tolerance = SPLIT_LOSS if "tensor parallelism" in case else TOLERANCE
    assert distance(result.gradients, reference.gradients) < tolerance
    assert result.losses == pytest.approx(reference.losses, rel=1e-7)
