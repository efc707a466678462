"""Build models through the standalone host and count their parameters; executed in a test world."""

from mindspeed_core import activate
from mindspeed_train import loop
from mindspeed_train.arguments import sizes

FLAGS = (
    "--platform cpu --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 4 --mock-data --num-workers 0 --eval-iters 0 --lr 1e-2 "
    "--train-iters 1"
)


def weights(cases):
    """Return for each case of flags: the parameters on this rank, and how many `sizes` says at least."""
    return [weighed(case) for case in cases]


def weighed(case):
    with activate(f"{FLAGS} {case}".split(), host="standalone") as session:
        run = loop.setup(session)
        try:
            bound = sum(sizes._weights(session, run.args).values())
            return sum(map(local_size, run.model[0].parameters())), bound
        finally:
            loop.teardown(session)


def local_size(parameter):
    return getattr(parameter, "_local_tensor", parameter).numel()
