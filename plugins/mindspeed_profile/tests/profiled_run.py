"""Trainings under measurement, several in the processes of one world; executed by its ranks."""

import os

from mindspeed_core.activation import activate
from mindspeed_megatron.flops import count_flops
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

STEPS = 3


def train_each(lines, steps=STEPS):
    """Train once for each command line; of each what was logged in every step, and the formula's count."""
    return [train_once(flags, steps) for flags in lines]


def plan_each(lines, steps=STEPS):
    """Run one rank of each command line dry; this process has no peers."""
    place = ("--fake-world-size", "2", "--fake-rank", "0")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        os.environ.pop(name, None)
    return [train_once((*place, *flags), steps, platform="fake") for flags in lines]


def train_once(flags, steps=STEPS, plugins=(), platform="cpu"):
    numbers = []
    command = training_flags(flags, steps)
    with activate(command, host="standalone", platform=platform, extra_plugins=plugins) as session:
        run = loop.setup(session)
        session.call("start_run", run=run)
        for _ in range(steps):
            result = session.call("train_step", run=run)
            run.iteration += 1
            run.consumed_train_samples += run.args.global_batch_size
            numbers.append(session.call("log_step", run=run, result=result))
        session.call("finish_run", run=run)
        sizes = {"seq_length": run.args.seq_length, "vocab_size": run.args.padded_vocab_size}
        found = {
            "numbers": numbers,
            "samples": run.args.global_batch_size,
            "formula": count_flops(run.config, causal=False, **sizes),
            "timers": run.config.timers,
        }
    destroy_megatron_state()
    return found
