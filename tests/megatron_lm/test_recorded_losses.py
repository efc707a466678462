"""Losses equal those that Megatron-LM core_v0.16.1 reached on the same data, recorded by `parity.py`.

Each world runs several cases one after the other, since starting one costs more than the steps in it.
"""

import itertools
import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
from cases import CASES, OURS, flags_of
from corpus import write_corpus

from mindspeed_testing.worlds import run_world

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))
STEPS_OF_THE_RUN = 50
"""Of the recorded runs: the schedule depends on it; only their first steps are recorded."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron_lm")
    write_corpus(folder / "corpus")
    found = {}
    for size in (1, 2):
        last = run_world(f"{__name__}:train_cases", size, size, str(folder), timeout=300)[-1]
        found |= last
    return found


@pytest.mark.parametrize("name", list(RECORDED))
def test_losses_and_norms_are_those_of_megatron_lm(trained, name):
    expected = RECORDED[name]
    assert trained[name]["lm loss"] == pytest.approx(expected["lm loss"], rel=1e-6)
    assert trained[name]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)


def test_every_case_is_recorded():
    assert list(RECORDED) == [case.name for case in CASES]


def train_cases(size, folder):
    cases = [case for case in CASES if case.world_size == size]
    return {case.name: _train(case, folder) for case in cases}


def _train(case, folder):
    from mindspeed_core.activation import activate
    from mindspeed_train import loop

    data = ["--data-path", f"{folder}/corpus", "--data-cache-path", f"{folder}/cache", "--num-workers", "0"]
    _meet(case.world_size)
    session = activate([*flags_of(case, STEPS_OF_THE_RUN), *OURS, *data], host="standalone")
    try:
        run = loop.setup(session)
        losses, norms = [], []
        for _ in range(len(RECORDED[case.name]["lm loss"])):
            result = session.call("train_step", run=run)
            run.iteration += 1
            run.consumed_train_samples += run.args.global_batch_size
            losses.append(result.losses["lm loss"])
            norms.append(result.grad_norm)
        loop.teardown(session)
    finally:
        session.close()
    return {"lm loss": losses, "grad_norm": norms}


_meetings = itertools.count()


def _meet(size):
    """Start the process group on keys of its own: a store remembers what an earlier group told it."""
    import torch.distributed as dist

    if size > 1:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"case{next(_meetings)}", store),
            rank=int(os.environ["RANK"]),
            world_size=size,
            timeout=timedelta(seconds=60),
        )
