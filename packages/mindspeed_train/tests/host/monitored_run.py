"""A training with every measurement on, where one rank is slow; executed by the ranks of a test world."""

import time
from pathlib import Path

from mindspeed_core.activation import prepare
from mindspeed_core.feature import hookimpl
from mindspeed_testing.model_flags import training_flags
from mindspeed_train.loop import train

LATE_SECONDS = 0.15
"""Far more than a forward pass takes, also beside other tests."""


class LateBatches:
    """Makes every batch of rank 1 arrive late."""

    @hookimpl(wrapper=True)
    def get_batch(self, run):
        if run.dist.rank == 1 and run.context.training:
            # Asleep, it takes no time from the other rank.
            time.sleep(LATE_SECONDS)
        return (yield)


def train_monitored(folder):
    watching = (
        "--log-throughput --peak-tflops 2 --timing-log-level 2 --log-straggler --log-interval 2 "
        "--eval-iters 3 --eval-interval 3 --platform cpu"
    ).split()
    flags = [*training_flags(watching, 4), "--run-dir", str(Path(folder))]
    with prepare(flags, extra_plugins=[LateBatches()], host="standalone") as session:
        train(session)
