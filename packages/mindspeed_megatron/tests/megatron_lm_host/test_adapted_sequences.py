"""Sequences split over ranks inside Megatron-LM's call graph: whole ones reach every pipeline stage."""

import os
from pathlib import Path

import fake_training as fake
import pytest

from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

FLAGS = (
    *("--platform", "cpu", "--global-batch-size", "8", "--eod-mask-loss", "--seq-length", "32"),
    *("--max-position-embeddings", "32", "--untie-embeddings-and-output-weights"),
)
RING = ("--context-parallel-size", "2")
HEADS = (*RING, "--context-parallel-algo", "ulysses_cp_algo")
DOCUMENTS = ("--reset-position-ids", "--reset-attention-mask")
PP2 = ("--pipeline-model-parallel-size", "2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_world(f"{__name__}:run_all", 4, str(tmp_path_factory.mktemp("script")), timeout=200)


OTHER_NAME = (
    ("    get_batch_on_this_cp_rank,\n", "    get_batch_on_this_cp_rank as own_part,\n"),
    ("get_batch_on_this_cp_rank(", "own_part("),
)


def run_all(folder):
    from mindspeed_cp.features import DECLARATIONS

    fake.adapt(*DECLARATIONS)
    found = {}
    for name, flags in {
        "whole": (),
        "ring": RING,
        "stages": (*RING, *PP2),
        "documents, ring": (*RING, *PP2, *DOCUMENTS),
        "documents, heads": (*HEADS, *PP2, *DOCUMENTS),
    }.items():
        done = fake.run_script(*FLAGS, *flags)
        found[name] = done["status"], [line["lm loss"] for line in done["log"] if "lm loss" in line]
        fake.forget_run()
    script = fake.changed_script(Path(folder) / f"script-{os.getpid()}.py", OTHER_NAME)
    done = fake.run_script(*FLAGS, *RING, script=script)
    found["own part"] = done["status"], done["err"]
    return found


def losses(runs, name):
    assert [rank[name][0] for rank in runs] == [0, 0, 0, 0]
    known = [rank[name][1] for rank in runs if rank[name][1]]
    assert all(found == known[0] for found in known)
    assert len(known[0]) == 3
    return known[0]


def test_losses_are_those_of_whole_sequences(runs):
    assert losses(runs, "ring") == pytest.approx(losses(runs, "whole"), rel=1e-5)


def test_documents_are_found_on_every_stage_of_a_pipeline(runs):
    ring, heads = losses(runs, "documents, ring"), losses(runs, "documents, heads")
    assert ring == pytest.approx(heads, rel=1e-5)
    assert abs(ring[0] - losses(runs, "stages")[0]) > 1e-4


def test_a_script_that_splits_by_other_means_is_refused(runs):
    assert {rank["own part"][0] for rank in runs} == {1}
    # Whichever rank comes first speaks for all.
    told = "".join(rank["own part"][1] for rank in runs)
    assert "gives sequences of 16 tokens where --seq-length is 32" in told
