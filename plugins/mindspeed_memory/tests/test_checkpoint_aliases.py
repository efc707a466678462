"""AscendSpeed's names of recomputation: what they stand for, and what is refused."""

import pytest

from mindspeed_core.activation import activate, prepare
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_memory.features.proofs import PP2
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

INSTALLED = Registry.discover()
SWITCH, POLICY, BLOCK = "--checkpoint-activations", "--checkpoint-policy", "--checkpoint_block_layer"
COUNTS, DISTRIBUTE = "--recomputation-layer-num", "--distribute-checkpointed-activations"


def prepared(*flags):
    line = training_flags(flags, 1, INSTALLED)
    return prepare(line, platform="cpu", registry=INSTALLED, host="standalone")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((SWITCH,), ("full", "uniform", 1, False)),
        ((SWITCH, POLICY, "block"), ("full", "block", 4, False)),
        ((SWITCH, POLICY, "block", BLOCK, "2"), ("full", "block", 2, False)),
        ((SWITCH, COUNTS, "3", "1", *PP2), ("full", "block", 3, False)),
        ((SWITCH, DISTRIBUTE), ("full", "uniform", 1, True)),
        ((SWITCH, "--recompute-granularity", "full"), ("full", "uniform", 1, False)),
        ((), (None, None, None, False)),
    ],
)
def test_names_stand_for_those_of_megatron_core(flags, expected):
    args = prepared(*flags).args
    assert (
        args.recompute_granularity,
        args.recompute_method,
        args.recompute_num_layers,
        args.distribute_saved_activations,
    ) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((POLICY, "block"), f"{POLICY} block needs {SWITCH}; add it"),
        ((BLOCK, "2"), f"{BLOCK} 2 needs {SWITCH}; add it"),
        ((COUNTS, "1"), f"{COUNTS} needs {SWITCH}; add it"),
        ((SWITCH, POLICY, "custom"), f"{POLICY} custom names no layers"),
        ((POLICY, "custom"), f"{POLICY} custom names no layers"),
        ((SWITCH, POLICY, "block", BLOCK, "-1"), f"{BLOCK} -1 is no number of layers"),
        ((SWITCH, COUNTS, "1", "2"), f"{COUNTS} 1 2 has 2 numbers for 1 pipeline stages"),
        ((SWITCH, COUNTS, "-1"), f"{COUNTS} -1: -1 is no number of layers"),
        (
            (SWITCH, "--recompute-granularity", "full", "--recompute-method", "block"),
            f"--recompute-method block: {SWITCH} stands for --recompute-method uniform; drop one of the two",
        ),
        (
            (SWITCH, COUNTS, "2", "--reduce-recompute-for-last-chunk"),
            f"--reduce-recompute-for-last-chunk and {COUNTS} both count layers of a stage",
        ),
        ((SWITCH, "--adaptive-recompute-device-swap"), f"drop {SWITCH}"),
        ((SWITCH, "--auto-recompute-device-size", "100"), f"drop {SWITCH}"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags, message):
    with pytest.raises(PlanError) as error:
        prepared(*flags)
    assert message in str(error.value)


def test_a_number_beyond_the_layers_is_noted():
    (note,) = prepared(SWITCH, POLICY, "block").plan.notes
    assert f"{BLOCK} 25: the model has 4 layers" in str(note)


def counted():
    flags = training_flags((*PP2, SWITCH, COUNTS, "2", "1"), 1, INSTALLED)
    with activate(flags, platform="cpu", registry=INSTALLED, host="standalone") as session:
        run = loop.setup(session)
        found = run.config.recompute_num_layers
        loop.teardown(session)
    return found


@pytest.mark.thorough
def test_each_stage_has_its_number():
    assert run_world(counted, 2) == [2, 1]
