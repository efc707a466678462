"""Ranks that made different schedules of the same arguments say so before they wait for each other."""

import os

import pytest
from trained import UNTIED, set_up, trained

from mindspeed_core.errors import UserError
from mindspeed_pp import plan
from mindspeed_pp.placement import Placement, loop
from mindspeed_pp.transforms import waves
from mindspeed_testing import run_world

RANKS = 3
FLAGS = ("--pipeline-model-parallel-size", str(RANKS), "--num-layers", str(RANKS), UNTIED)
OTHERS = {
    "order": Placement(tuple(range(RANKS))),
    # Its last rank sends to others than the first ranks await.
    "channels": Placement((0, 2, 1)),
}
"""Placement of the last rank's file."""


def texts(case):
    """The file of the first ranks, and that of the last one."""
    usual, other = (waves("usual", place, 8) for place in (loop(RANKS), OTHERS[case]))
    text = other.text()
    return usual.text(), text.replace("F2.0 F2.1", "F2.1 F2.0") if case == "order" else text


def with_another_file(cases):
    said = {}
    rank = int(os.environ["RANK"])
    for case, found in cases.items():
        # As a file of this name on another machine.
        plan.schedule_text = lambda path, found=found: found[rank == RANKS - 1]
        try:
            with set_up(*FLAGS, "--pipeline-schedule-file", f"{case}.txt") as run:
                trained(run, steps=1)
        except UserError as error:
            said[case] = str(error)
    return said


@pytest.fixture(scope="module")
def ranks():
    return run_world(with_another_file, RANKS, {case: texts(case) for case in OTHERS}, timeout=120)


@pytest.mark.parametrize("case", OTHERS)
def test_every_rank_names_itself_and_one_that_differs(ranks, case):
    for rank, said in enumerate(ranks):
        other = 0 if rank == RANKS - 1 else RANKS - 1
        assert said[case].startswith(
            f"--pipeline-schedule usual: pipeline ranks {rank} and {other} have different lists of actions ("
        )
        assert said[case].endswith(
            "the same schedule files, profiles and versions of packages have to be on all machines"
        )
