"""Features of memory in a loop of one's own: it trains, to the bit, what the standalone host trains."""

import pytest
from own_loop import both

from mindspeed_core.testing import run_world

# The loop reduces gradients in the type of the model.
HALF = ("--bf16", "--grad-reduce-in-bf16")
PP2 = ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1")
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
SMALL = ("--compress-min-elements", "256")

ALONE = {
    "released gradients": (HALF, ("--release-fp32-grad",)),
    "moments on the host": (HALF, ("--virtual-optimizer", "all")),
    "compressed moments": (HALF, ("--compress-optimizer",)),
    "compressed layers": (HALF, ("--compress-activation", "0", *SMALL)),
    "compressed products": (HALF, ("--compress-dense", "level1", *SMALL)),
    "dense layers with biases": (("--recompute-granularity", "selective", "--recompute-modules", "mlp"), ()),
    "modules computed again by name": ((), ("--recompute-plan", "decoder.layers.{0-1}.mlp")),
    "modules swapped by name": (
        (),
        ("--swap-activation-plan", "decoder.layers.{0-2}", "--swap-min-bytes", "256"),
    ),
    "growing segments": ((), ("--memory-fragmentation",)),
    "a report": ((), ("--memory-report",)),
}
TOGETHER = {
    "computed again in advance": ((*PP2, *BLOCK), ("--recompute-in-advance",)),
    "computed again in the bubble": (PP2, ("--recompute-in-bubble",)),
}


def train_all(cases, folder):
    return {
        name: both(model, (*features, "--memory-report-path", folder) if name == "a report" else features)
        for name, (model, features) in cases.items()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    results = {name: [found] for name, found in run_world(train_all, 1, ALONE, str(folder))[0].items()}
    for rank in run_world(train_all, 2, TOGETHER, str(folder)):
        for name, found in rank.items():
            results.setdefault(name, []).append(found)
    return results, folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_the_losses_are_those_of_the_standalone_host(trained, name):
    for expected, losses, *_ in trained[0][name]:
        assert losses == expected
        assert len(set(losses)) == len(losses)


@pytest.mark.thorough
def test_layers_were_computed_again_early(trained):
    for name in TOGETHER:
        numbers = trained[0][name][0][3]
        assert any(step.get("early recomputations") for step in numbers)


@pytest.mark.thorough
def test_the_second_step_was_reported(trained):
    assert {path.suffix for path in trained[1].iterdir()} == {".json", ".svg", ".pickle"}
