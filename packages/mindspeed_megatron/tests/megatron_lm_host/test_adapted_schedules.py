"""Schedules of mindspeed-pp inside Megatron-LM's call graph."""

import re
import zlib

import fake_training as fake
import pytest

from mindspeed_core.feature import Flag, hookimpl
from mindspeed_megatron.unwrap import unwrap
from mindspeed_pp.features import LaterWeightGradients, MicrobatchSizes, NumLayerList, PipelineSchedule
from mindspeed_testing.worlds import run_world

LOCAL = ("--platform", "cpu", *fake.GPT, "--pipeline-model-parallel-size", "2", "--hidden-dropout", "0")
UNTIED = ("--untie-embeddings-and-output-weights", "--num-layers", "4")
BATCH = ("--micro-batch-size", "1", "--global-batch-size", "2")
CASES = {
    "native": (),
    "1f1b": ("--pipeline-schedule", "1f1b"),
    "zb-h1": ("--pipeline-schedule", "zb-h1"),
    # The first stage is on the last rank, and the loss on the first one.
    "swapped": ("--pipeline-schedule-file", "{file}"),
    # Both ends of the model are on the first rank, each rank has two virtual stages.
    "zbv": ("--pipeline-schedule", "zbv"),
    "layers": ("--pipeline-schedule", "zb-h1", "--num-layer-list", "3,1"),
    # Both micro-batches of the batch as one.
    "sizes": ("--optimized-mbs-list", "2"),
}


SWAPPED = """
ranks 1 0
microbatches 2
0: F1.0 A1.0 F1.1 A1.1
1: F0.0 F0.1 A0.0 A0.1
"""


class SameWeights(fake.ForTests):
    """Weights that depend on the layer alone, not on the rank that draws them."""

    name = "same-weights"
    flags = (Flag("--same-weights", help="Weights by name."),)

    @hookimpl(wrapper=True)
    def build_model(self):
        chunks = yield
        import torch

        with torch.no_grad():
            for chunk in chunks:
                layers = unwrap(chunk).decoder.layers
                for name, weight in unwrap(chunk).named_parameters():
                    at = re.search(r"layers\.(\d+)\.", name)
                    number = layers[int(at[1])].layer_number if at else 0
                    rest = re.sub(r"layers\.\d+\.", f"layers.{number}.", name)
                    draw = torch.Generator().manual_seed(zlib.crc32(rest.encode()))
                    if weight.dim() > 1:
                        weight.normal_(0.0, 0.02, generator=draw)
        return chunks


def train_all(file):
    fake.adapt(PipelineSchedule, LaterWeightGradients, MicrobatchSizes, NumLayerList, SameWeights)
    found = {}
    for name, flags in CASES.items():
        flags = [flag.format(file=file) for flag in flags]
        found[name] = fake.run_script(*LOCAL, *UNTIED, *BATCH, "--same-weights", *flags)
        fake.forget_run()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("orders") / "swapped.txt"
    path.write_text(SWAPPED)
    return run_world(f"{__name__}:train_all", 2, str(path), timeout=300)


def losses(result):
    found = [line["lm loss"] for line in result["log"] if "lm loss" in line]
    assert len(found) > 1, result["err"]
    return found


@pytest.mark.parametrize("name", sorted({*CASES} - {"native"}))
def test_a_schedule_trains_what_megatron_lms_own_trains(ranks, name):
    # The norm of gradients is summed over other ranks where stages have other layers.
    tolerance = 1e-6 if name in ("layers", "swapped", "sizes", "zbv") else 0
    assert losses(ranks[1][name]) == pytest.approx(losses(ranks[1]["native"]), rel=tolerance, abs=0)
