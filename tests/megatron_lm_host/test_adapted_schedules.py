"""Schedules of mindspeed-pp inside Megatron-LM's call graph."""

import fake_training as fake
import pytest

from mindspeed_core.testing.worlds import run_world
from mindspeed_pp.features import LaterWeightGradients, NumLayerList, PipelineSchedule

LOCAL = ("--platform", "cpu", *fake.GPT, "--pipeline-model-parallel-size", "2", "--hidden-dropout", "0")
UNTIED = ("--untie-embeddings-and-output-weights", "--num-layers", "4")
CASES = {
    "native": (),
    "1f1b": ("--pipeline-schedule", "1f1b"),
    "zb-h1": ("--pipeline-schedule", "zb-h1"),
    "layers": ("--pipeline-schedule", "zb-h1", "--num-layer-list", "3,1"),
}


def train_all():
    fake.adapt(PipelineSchedule, LaterWeightGradients, NumLayerList)
    found = {}
    for name, flags in CASES.items():
        found[name] = fake.run_script(*LOCAL, *UNTIED, *flags)
        fake.forget_run()
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_world(f"{__name__}:train_all", 2, timeout=300)


def losses(result):
    found = [line["lm loss"] for line in result["log"] if "lm loss" in line]
    assert len(found) > 1, result["err"]
    return found


@pytest.mark.parametrize("name", sorted({*CASES} - {"native"}))
def test_a_schedule_trains_what_megatron_lms_own_trains(ranks, name):
    # The norm of gradients is summed over other ranks where stages have other layers.
    tolerance = 1e-6 if name == "layers" else 0
    assert losses(ranks[1][name]) == pytest.approx(losses(ranks[1]["native"]), rel=tolerance, abs=0)


def refused():
    fake.adapt(PipelineSchedule, LaterWeightGradients)
    return fake.run_script(*LOCAL, *UNTIED, "--pipeline-schedule", "zbv")


def test_a_schedule_that_places_the_loss_on_the_first_rank_is_refused():
    ranks = run_world(f"{__name__}:refused", 2)
    assert [rank["status"] for rank in ranks] == [1, 1]
    printed = "".join(rank["err"] for rank in ranks)
    assert "Megatron-LM's scripts look for losses on the last one" in printed
