"""Every algorithm with every kind of mask and of heads trains like one process with the whole sequence."""

import pytest
import torch

from mindspeed_core.feature import hookimpl
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_testing import run_world
from mindspeed_testing.compare import compare_numbers, compare_tensors
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.training import SideRequest, train_rank

STEPS, TOLERANCE = 5, 2e-5
_ALGO, _INNER = "--context-parallel-algo", ("--ulysses-degree-in-cp", "2")
ALGORITHMS = {
    "ring": (_ALGO, "megatron_cp_algo"),
    "Ulysses": (_ALGO, "ulysses_cp_algo"),
    "fetched": (_ALGO, "kvallgather_cp_algo"),
    "adaptive": (_ALGO, "adaptive_cp_algo"),
    "double ring": (_ALGO, "megatron_cp_algo", "--cp-window-size", "2"),
    "hybrid": (_ALGO, "hybrid_cp_algo", *_INNER),
    "hybrid adaptive": (_ALGO, "hybrid_adaptive_cp_algo", *_INNER),
}
ON_TWO = ("ring", "Ulysses", "fetched", "adaptive")
HEADS = {"as many key heads": (), "shared key heads": ("--group-query-attention", "--num-query-groups", "2")}
# Adam divides by the root of the second moment: see the proofs.
MODEL = ("--num-layers", "2", "--position-embedding-type", "rope", "--adam-eps", "1e-3")
DENSE = "--create-attention-mask-in-dataloader"
PACKED = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss")
MASKS = {
    "causal": ((), ()),
    "full": ((), (DENSE,)),
    "window": (("--window-size", "9,0"), ()),
    "packed": (PACKED, (DENSE,)),
}
"""Of each kind of mask the flags of both sides, and what the whole sequence needs besides."""


class EveryKey:
    """Queries see all keys: as a rule where the sequence is split, as a dense mask where it is whole."""

    @hookimpl
    def cp_mask_rule(self, run):
        """No mask."""
        return (MaskRule(run.args.seq_length, causal=False),)

    @hookimpl(wrapper=True, trylast=True)
    def get_batch(self):
        """Nothing hidden."""
        batch = yield
        if batch.attention_mask is None:
            return batch
        return batch.with_(attention_mask=torch.zeros_like(batch.attention_mask))


def request(mask, heads, flags, initial=None):
    both, _ = MASKS[mask]
    return SideRequest(
        flags=tuple(training_flags((*MODEL, *HEADS[heads], *both, *flags), STEPS)),
        steps=STEPS,
        initial=initial,
        probes=(f"{__name__}:EveryKey",) if mask == "full" else (),
        platform="cpu",
    )


def trained(requests):
    return [train_rank(one) for one in requests]


@pytest.fixture(scope="module")
def whole():
    """Train on one process, by kind of mask and of heads."""
    names = [(mask, heads) for mask in MASKS for heads in HEADS]
    (found,) = run_world(trained, 1, [request(*name, MASKS[name[0]][1]) for name in names])
    return dict(zip(names, found))


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "algorithms"), [(2, ON_TWO), (4, tuple(ALGORITHMS))])
def test_losses_gradients_and_weights_are_those_of_the_whole_sequence(whole, ranks, algorithms):
    names = [(algorithm, *kind) for algorithm in algorithms for kind in whole]
    split = ("--context-parallel-size", str(ranks))
    requests = [
        request(*kind, (*split, *ALGORITHMS[algorithm]), whole[tuple(kind)].initial)
        for algorithm, *kind in names
    ]
    found, *_ = run_world(trained, ranks, requests, timeout=600)
    for (algorithm, *kind), side in zip(names, found):
        baseline = whole[tuple(kind)]
        what = f"{algorithm}, {', '.join(kind)}"
        assert "context-parallel" in side.features, what
        for mine, other in zip(side.losses, baseline.losses, strict=True):
            losses = compare_numbers(
                list(mine.values()), list(other.values()), tolerance=TOLERANCE, quantity=what
            )
            assert losses.equal, losses
        states = [*zip(side.gradients, baseline.gradients, strict=True)]
        for mine, other in [*states, (side.parameters, baseline.parameters)]:
            tensors = compare_tensors(mine.tensors, other.tensors, tolerance=TOLERANCE, quantity=what)
            assert tensors.equal, tensors
