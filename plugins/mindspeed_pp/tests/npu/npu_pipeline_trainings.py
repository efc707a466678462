"""Pipeline stages on value devices: every schedule trains as the CPU, and HCCL would serve its messages."""

from __future__ import annotations

import pytest

from mindspeed_pp.features import DECLARATIONS
from mindspeed_pp.features.proofs import CHUNKS2, as_native
from mindspeed_pp.schedules import BUILT_IN
from mindspeed_testing.npu import ScenarioWorlds, device_scenarios

EACH_SCHEDULE = (
    *("pp-engine-1f1b", "pp-engine-interleaved", "pp-engine-fold-aiao", "pp-chimera-pp2"),
    *(f"pp-weight-gradients-{name}" for name in ("zb-h1", "zb-h2", "zbi", "zbv", "list", "dualpipev")),
    *("pp-weight-gradients-nanopipe", "pp-weight-gradients-zbv-bf16"),
)
TRAININGS = [
    *device_scenarios(DECLARATIONS, always=EACH_SCHEDULE),
    pytest.param("pp-engine", as_native("fold-fifo", "fold-fifo", chunks=CHUNKS2), id="pp-engine-fold-fifo"),
]


@pytest.fixture(scope="module")
def trained(asked_for):
    return ScenarioWorlds(asked_for("scenario"))


@pytest.mark.parametrize(("feature", "scenario"), TRAININGS)
def test_pipeline_stages_train_as_the_cpu(feature, scenario, trained):
    training = trained.assert_equals_cpu(scenario)
    assert feature in training.side.features


def test_every_schedule_is_among_those_of_an_ordinary_run():
    ordinary = [parameter.values[1].flags for parameter in TRAININGS if not parameter.marks]
    chosen = [flags for flags in ordinary if "--pipeline-schedule" in flags]
    named = {flags[flags.index("--pipeline-schedule") + 1] for flags in chosen}
    assert named >= {rule.name for rule in BUILT_IN}
