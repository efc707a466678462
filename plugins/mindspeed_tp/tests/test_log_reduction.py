"""Losses of a step are summed beside the update: nobody waits for them before somebody reads one."""

import pytest

from mindspeed_core.activation import activate
from mindspeed_core.hosts.standalone import loop
from mindspeed_core.instruments.communication import count_communication
from mindspeed_core.testing import run_world
from mindspeed_core.testing.model_flags import training_flags


def reduced(*flags):
    with activate(training_flags(flags, 2), host="standalone") as session:
        run = loop.setup(session)
        found = []
        for _ in range(2):
            with count_communication() as log:
                result = session.call("train_step", run=run)
                call = next(iter(log.select(group="log")), None)
                waited = call is not None and call.waited is not None
                loss = result.losses["lm loss"]
            found.append((waited, call is not None and call.asynchronous, loss))
        loop.teardown(session)
    return found


def test_the_sum_of_a_step_is_waited_for_when_its_loss_is_read():
    pipelined = ("--pipeline-model-parallel-size", "2")
    plain = run_world(reduced, 2, *pipelined)
    ranks = run_world(reduced, 2, *pipelined, "--async-log-allreduce")
    for rank, other in zip(ranks, plain, strict=True):
        assert [step[:2] for step in rank] == [(False, True), (False, True)]
        assert [step[2] for step in rank] == pytest.approx([step[2] for step in other], rel=0)
