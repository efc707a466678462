"""Losses that layers add to the gradient are those of one process, whatever the layout and the loss mask.

A cell of the matrix trains a loss on a layout, with a share of the tokens masked, and compares the norm of
all gradients and the reported losses with their definition in plain torch.
"""

import pytest
from layer_loss_cases import LAYOUTS, LOSSES, STEPS, Case, defined, train

from mindspeed_core.errors import UserError
from mindspeed_core.feature import hookimpl
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.numbered_batches import MASKS, PROBES
from mindspeed_testing.training import SideRequest, train_rank
from mindspeed_testing.worlds import WorldError, run_world

DEFAULT = (
    *(Case(losses, "of 2", "half", True) for losses in ("seq", "z", "device")),
    *(Case("all", "of 2", mask, True) for mask in ("whole", "tenth", "uneven")),
    Case("all", "of 4", "uneven", True),
    *(Case("all", "of 2", "uneven", per_token) for per_token in (True, False)),
    *(Case("all", layout, "uneven", True) for layout in ("tp 2, sp", "cp 2", "dp 2", "pp 2")),
    *(Case("all", layout, "uneven", False) for layout in ("cp 2", "dp 2, of 2")),
)


def all_cases():
    """Yield every cell that makes sense."""
    for losses in LOSSES:
        for layout in LAYOUTS:
            # Without experts there is nothing to spread.
            if losses == "predictions" and layout == "ep 2":
                continue
            for mask in MASKS:
                for per_token in (True, False):
                    yield Case(losses, layout, mask, per_token)


FURTHER = [case for case in all_cases() if case not in DEFAULT]


def trained(cases):
    """Trained cases, each beside its definition; few processes train all of them."""
    first = [Case(losses, "micro-batches of 1", "whole", False) for losses in {case.losses for case in cases}]
    initial = {
        case.losses: record[2] for case, record in zip(first, run_world(train, 1, first, {})[0], strict=True)
    }
    found = {}
    for ranks in sorted({LAYOUTS[case.layout].ranks for case in cases}):
        here = [case for case in cases if LAYOUTS[case.layout].ranks == ranks]
        records = run_world(train, ranks, here, initial, timeout=30 + 30 * len(here))[0]
        for case, record in zip(here, records, strict=True):
            found[case] = record, defined(case, initial[case.losses].tensors)
    return found


def check(record, definition):
    """Compare the first step with its definition."""
    (norms, losses, *_), (norm, step) = record, definition
    assert len(norms) == STEPS
    assert norms[0] == pytest.approx(norm, rel=2e-5)
    reported = {name: value for name, value in step.reported.items() if name in losses[0]}
    # Losses of devices are trained and not reported.
    assert step.reported.keys() - reported.keys() <= {"device", "communication"}
    assert {name: losses[0][name] for name in reported} == pytest.approx(
        {name: value.item() for name, value in reported.items()}, rel=2e-5
    )


@pytest.fixture(scope="module")
def matrix(asked_for):
    return trained([case for case in DEFAULT if case in asked_for("case")])


@pytest.mark.parametrize("case", dict.fromkeys(DEFAULT), ids=str)
def test_a_loss_of_layers_is_that_of_one_process(matrix, case):
    check(*matrix[case])


@pytest.mark.thorough
@pytest.mark.parametrize("losses", LOSSES)
def test_every_loss_on_every_layout_and_mask(losses):
    found = trained([case for case in FURTHER if case.losses == losses])
    wrong = []
    for case, (record, definition) in found.items():
        try:
            check(record, definition)
        except AssertionError as error:
            wrong.append(f"{case}: {error}")
    assert not wrong, "\n".join(wrong)


class Unsaid:
    """A loss that counts other tokens than the loss mask of its batch says."""

    @hookimpl(wrapper=True)
    def compute_loss(self):
        loss = yield
        return loss.scaled(1.0, loss.num_tokens / 2)


def train_unsaid():
    case = Case("aux", "of 2", "half", True)
    probes = (*PROBES["half"], f"{__name__}:Unsaid")
    request = SideRequest(training_flags(case.flags, 2), 1, gradients=False, probes=probes, platform="cpu")
    return train_rank(request)


def test_a_loss_that_counts_other_tokens_is_refused():
    with pytest.raises((UserError, WorldError), match=r"counted 32 tokens .* micro-batches say 64"):
        run_world(train_unsaid, 1)
