"""Ranks whose candidates die, hang or fail by their name, and others that train nothing."""

import os
import threading

from mindspeed_tune import measured_run


def faulty_candidates(queue, file, steps, limit, platform):
    """Run a queue as `run_candidates` does, with stand-ins for trainings."""
    measured_run._run = _stand_in
    return measured_run.run_candidates(queue, file, steps, limit, platform)


def _stand_in(arguments, steps, platform, memory):
    seed = int(arguments[arguments.index("--seed") + 1])
    if seed == 13:
        os._exit(9)
    if seed == 14:
        threading.Event().wait()
    if seed == 15:
        raise MemoryError("out of memory: tried to allocate 80 GiB")
    return {"times": [0.1 * seed] * steps, "peak": 2.0**20, "load": 0.5}


_SECONDS = {1: (1.0, 1.2, 1.3, 1.01), 2: (1.04, 1.3, 1.25, 1.05), 9: (3.0, 4.0, 4.0)}


def noisy_candidates(queue, file, steps, limit, platform):
    """Run a queue with two candidates whose fourth rounds come near their shortest steps."""
    rounds = iter([int(name.rpartition("round ")[2]) for name, _, _ in queue])

    def run(arguments, *_):
        seed = int(arguments[arguments.index("--seed") + 1])
        return {"times": [_SECONDS[seed][next(rounds)]] * steps, "peak": None, "load": 0.5}

    measured_run._run = run
    return measured_run.run_candidates(queue, file, steps, limit, platform)
