"""Striped attention trains like a sequence that is not split, and a prefix is seen by all."""

import re
from pathlib import Path

import pytest

import mindspeed_cp
from acme_cp.planner import STRIPS, strips
from mindspeed_core.activation import prepare
from mindspeed_core.feature import hookimpl
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.testing.contract import contract_checks
from mindspeed_core.testing.model_flags import training_flags
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import imbalance


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_strips_are_dealt_out_in_turn_and_more_even_than_consecutive_parts(ranks):
    rule = MaskRule(1024)
    layout = strips([rule], ranks)
    width = 1024 // (STRIPS * ranks)
    assert layout.positions(1)[:width].tolist() == list(range(width, 2 * width))
    assert set(layout.lengths) == {1024 // ranks}
    assert imbalance(layout, [rule]) <= 1 + 1 / STRIPS


def test_sizes_that_do_not_divide_are_refused_by_the_planner():
    flags = ("--context-parallel-size", "3", "--context-parallel-algo", "striped_cp_algo")
    with pytest.raises(PlanError, match="--seq-length 32 is no multiple of 4 strips x 3 ranks"):
        prepare(training_flags(flags, 1), platform="cpu", host="standalone")


class Watch:
    """Remembers the positions that this rank holds."""

    positions = None

    @hookimpl(wrapper=True)
    def get_batch(self):
        batch = yield
        if batch.packed_seq_params is not None:
            self.positions = batch.packed_seq_params.positions.tolist()
        return batch


def trained(split, flags):
    """Return losses and gradient norms of two steps, and this rank's positions if the sequence is split."""
    from mindspeed_core import activate
    from mindspeed_core.hosts.standalone import loop

    found, watch = [], Watch()
    size = ("--context-parallel-size", "2") if split else ()
    model = ("--num-layers", "2", "--position-embedding-type", "rope", *size, *flags)
    with activate(
        training_flags(model, 2), host="standalone", platform="cpu", extra_plugins=[watch]
    ) as session:
        run = loop.setup(session)
        for _ in range(2):
            result = session.call("train_step", run=run)
            found += [result.losses["lm loss"], result.grad_norm]
        loop.teardown(session)
    return found, watch.positions


def both():
    """Train by the planner, and with a prefix that hides nothing of the keys."""
    adaptive = ("--context-parallel-algo", "adaptive_cp_algo", "--adaptive-cp-manually-set-mask-list")
    return (
        trained(True, ("--context-parallel-algo", "striped_cp_algo")),
        trained(True, (*adaptive, "--acme-prefix", "9")),
    )


def test_the_planner_is_a_choice_and_trains_like_a_sequence_that_is_not_split(mindspeed_world):
    ((plain, _),) = mindspeed_world(trained, 1, False, ())
    (striped, positions), (prefixed, _) = mindspeed_world(both, 2)[0]
    assert positions == [*range(4), *range(8, 12), *range(16, 20), *range(24, 28)]
    assert striped == pytest.approx(plain, rel=1e-5)
    # Early tokens see more with a prefix: another training, by more than rounding.
    assert prefixed != pytest.approx(plain, rel=1e-4)


def test_the_page_of_context_parallelism_shows_what_is_here():
    page = Path(mindspeed_cp.__file__).with_name("docs") / "context-parallel.md"
    shown = re.findall(r"```python\n# examples/plugins/acme_cp/(\S+)\n(.*?)```", page.read_text(), re.DOTALL)
    root = Path(__file__).parents[1]
    assert [path for path, body in shown if body.rstrip() in (root / path).read_text()] == [
        "src/acme_cp/planner.py",
        "src/acme_cp/features.py",
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("check", contract_checks("acme-cp", platform="cpu"), ids=str)
def test_the_contract_is_kept(check):
    check()
