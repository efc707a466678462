"""Features on the lagging device: nothing relies on an order that nobody promises, and the numbers stay."""

import json
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from mindspeed_core.activation import prepare
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_testing import run_world
from mindspeed_testing.lagging.runs import Training, outcomes
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.verify import verify
from mindspeed_train import loop

PLUGINS = ("memory", "moe", "tp", "pp", "cp", "kernels", "optim", "models", "profile", "tune")
BATCH = ("--global-batch-size", "4")
PP2 = ("--pipeline-model-parallel-size", "2")
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "2")
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
EXPERTS = (
    *("--num-layers", "2", "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"),
    *("--swiglu", "--disable-bias-linear"),
)
TRAININGS = {
    "rings of context parallelism": ("--context-parallel-size", "2", "--use-flash-attn"),
    "exchanges of experts beside computation": (*EXPERTS, "--moe-alltoall-overlap-comm"),
    "passes of two micro-batches by turns": (*EXPERTS, "--moe-fb-overlap"),
    "products in parts": ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-ascend-coc"),
    "norms that are dropped when they were gathered": (
        *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        *("--recompute-granularity", "selective", "--recompute-modules", "layernorm"),
    ),
    "messages of pipeline stages": (*PP2, "--pipeline-schedule", "zbv"),
    "batches that workers read ahead": ("--num-workers", "2"),
    "losses that are summed beside the update": ("--async-log-allreduce",),
    "operands of pipeline stages on the host": (*PP2, *CHUNKS, "--use-nanopipe", "--use-nanopipe-swap"),
    "outputs of interleaved stages": (*PP2, *CHUNKS),
    "layers computed again in advance": (*PP2, *CHUNKS, *BLOCK, "--recompute-in-advance"),
    "layers computed again in the bubble": (*PP2, *CHUNKS, "--recompute-in-bubble"),
    "gradients and parameters of data parallelism": (
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        *("--swap-attention", "--swap-min-bytes", "1", "--use-flash-attn"),
    ),
}
LATER = (
    *("operands of pipeline stages on the host", "outputs of interleaved stages"),
    *("layers computed again in the bubble", "norms that are dropped when they were gathered"),
    "batches that workers read ahead",
)
EARLY = ("layers computed again in advance", "layers computed again in the bubble")


@pytest.fixture(scope="module")
def trained(asked_for):
    """Train each case on CPU and on the lagging device, on the same two ranks."""
    cases = {case: TRAININGS[case] for case in TRAININGS if case in asked_for("case")}
    trainings = [
        Training((*BATCH, *flags), platform=platform)
        for flags in cases.values()
        for platform in ("cpu", "lagging")
    ]
    ranks = run_world(outcomes, 2, trainings, timeout=280)
    return {
        case: [(rank[2 * place], rank[2 * place + 1]) for rank in ranks] for place, case in enumerate(cases)
    }


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.thorough) if case in LATER else case for case in TRAININGS],
)
def test_a_training_on_the_lagging_device_is_that_on_cpu(trained, case):
    for on_cpu, late in trained[case]:
        assert not on_cpu.error
        assert not late.error, late.error
        assert late == on_cpu


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.thorough) if case in LATER else case for case in EARLY]
)
def test_a_rank_that_waits_computes_layers_again(trained, case):
    assert any(late.recorded["early recomputations"] for _, late in trained[case])


def every_proof():
    declared = [
        one for plugin in PLUGINS for one in import_module(f"mindspeed_{plugin}.features").DECLARATIONS
    ]
    return scenario_parameters(declared, platform="cpu", always=(), first=0)


@pytest.mark.parametrize(("feature", "scenario"), every_proof())
def test_every_proof_holds_on_the_lagging_device(feature, scenario):
    # What is gained is another platform's; numbers and orders count here.
    verdict = verify(feature, replace(scenario, gains=()), platform="lagging")
    assert verdict.passed, str(verdict)


def saved_beside_training():
    """Train three steps with a save in the background behind each; return the losses on both platforms."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for platform in ("cpu", "lagging"):
            flags = (
                *("--num-layers", "2", "--global-batch-size", "2", "--save-interval", "1", "--async-save"),
                *("--save", f"{folder}/{platform}", "--run-dir", f"{folder}/run-{platform}"),
            )
            with prepare(training_flags(flags, 3), host=DEFAULT_HOST, platform=platform) as session:
                loop.train(session)
            lines = Path(folder, f"run-{platform}", "metrics.jsonl").read_text().splitlines()
            found.append([json.loads(line)["loss"] for line in lines])
    return found


@pytest.mark.thorough
def test_saves_in_the_background_wait_for_their_copies():
    ((on_cpu, late),) = run_world(saved_beside_training, 1, timeout=120)
    assert len(on_cpu) == 3
    assert late == on_cpu
