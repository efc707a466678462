"""The norm of gradients counts every element once, whatever tensor parallelism cuts or copies."""

import pytest
import torch
from parameter_kinds import FOUR, KINDS, train

from mindspeed_testing.worlds import run_world

EVERY_TIME = ("sinks", "sinks, flash attention", "gates", "spread experts", "uneven shards")


def norms(kinds, ranks):
    """By kind: norms of one process, of the layout, and of the layout's gradients put together."""
    one = run_world(train, 1, {name: model for name, (model, _) in kinds.items()}, {})[0]
    initial = {name: record[2] for name, record in one.items()}
    lines = {name: f"{model} {layout}" for name, (model, layout) in kinds.items()}
    several = run_world(train, ranks, lines, initial, timeout=30 + 30 * len(lines))[0]
    found = {}
    for name, (norm, gradients, _) in several.items():
        whole = torch.stack([part.double().square().sum() for part in gradients.values()]).sum().sqrt()
        found[name] = one[name][0], norm, whole.item()
    return found


@pytest.fixture(scope="module")
def counted(asked_for):
    return norms({name: KINDS[name] for name in EVERY_TIME if name in asked_for("kind")}, 2)


@pytest.mark.parametrize("kind", EVERY_TIME)
def test_the_norm_counts_every_element_once(counted, kind):
    one, norm, whole = counted[kind]
    assert norm == pytest.approx(whole, rel=1e-6)
    assert norm == pytest.approx(one, rel=2e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(("kinds", "ranks"), [(KINDS, 2), (FOUR, 4)], ids=["two ranks", "four ranks"])
def test_the_norm_counts_every_element_of_every_kind_once(kinds, ranks):
    for one, norm, whole in norms(kinds, ranks).values():
        assert norm == pytest.approx(whole, rel=1e-6)
        assert norm == pytest.approx(one, rel=2e-5)
