"""Checkpoints of every form of state: resumed exactly, exchanged with AdamW, read under other layouts."""

from __future__ import annotations

import pytest
from optimizer_runs import differing, opened, optimizer_tensors, save, train

from mindspeed_testing.worlds import run_world

BF16 = ("--bf16", "--clip-grad", "0.5")
SHARDED = (*BF16, "--use-distributed-optimizer")
OVERLAPPED = (*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
HALF = (*SHARDED, "--grad-reduce-in-bf16")
TP2 = ("--tensor-model-parallel-size", "2")
REUSE = ("--reuse-fp32-param",)
SWAP = ("--swap-optimizer", "--swap-optimizer-times", "5")
FORMS = {
    "split": (OVERLAPPED, REUSE),
    "swapped": (SHARDED, SWAP),
    "split, whole parameters": (BF16, REUSE),
    "compressed": (SHARDED, ("--compress-optimizer",)),
    "split, signs": (SHARDED, (*REUSE, "--reuse-fp32-ties", "sign")),
    "split, signs, whole parameters": (BF16, (*REUSE, "--reuse-fp32-ties", "sign")),
    "released": (HALF, ("--release-fp32-grad",)),
    "swapped, whole parameters": (BF16, SWAP),
    "swapped, one window": (SHARDED, ("--swap-optimizer", "--swap-optimizer-times", "0")),
    "swapped, float32": ((), SWAP),
    "virtual": (SHARDED, ("--virtual-optimizer", "0.0002", *REUSE)),
    "compressed, whole parameters": (BF16, ("--compress-optimizer", *REUSE)),
    "half-up": (SHARDED, (*REUSE, "--reuse-fp32-rounding", "half-up")),
}
THOROUGH = tuple(FORMS)[1:]


def plain_run(layout, folder):
    """Train with AdamW, and return its state at the checkpoint in the middle."""
    with opened(*layout, "--save", folder) as run:
        train(run, 2)
        save(run)
        return optimizer_tensors(run), train(run, 2)


def run_form(folder, name):
    """Train, save and resume a form and AdamW, each with its own checkpoint and with the other's."""
    layout, flags = FORMS[name]
    root = f"{folder}/{name}"
    adams = f"{root}/plain"
    state, went_on = plain_run(layout, adams)
    with opened(*layout, *flags, "--save", root) as run:
        train(run, 2)
        save(run)
        own, own_went_on = optimizer_tensors(run), train(run, 2)
    with opened(*layout, *flags, "--load", root) as run:
        loaded, resumed = optimizer_tensors(run), train(run, 2)
    with opened(*layout, "--load", root) as run:
        as_adam, adam_resumed = optimizer_tensors(run), train(run, 2)
    with opened(*layout, *flags, "--load", adams) as run:
        from_adam, resumed_from_adam = optimizer_tensors(run), train(run, 2)
    with opened(*layout, *flags, *TP2, "--load", root) as run:
        as_tp2 = optimizer_tensors(run)
    return {
        "resumed": (resumed, own_went_on),
        "resumed by AdamW": (adam_resumed, own_went_on),
        "resumed from AdamW": (resumed_from_adam, went_on),
        "trained": (own_went_on, went_on),
        "loaded": differing(own, loaded),
        "read by AdamW": differing(own, as_adam),
        "read from AdamW": differing(state, from_adam),
        "read under another layout": differing(own, as_tp2),
        "equal to AdamW": differing(own, state),
        "tensors": len(own),
    }


def read_alone(folder, name):
    """Load the state of two ranks in one process, with the form and with AdamW, and go on."""
    layout, flags = FORMS[name]
    load = ("--load", f"{folder}/{name}")
    with opened(*layout, *flags, *load) as run:
        own, own_steps = optimizer_tensors(run), train(run, 4)
    with opened(*layout, *load) as run:
        adams, adam_steps = optimizer_tensors(run), train(run, 4)
    with opened(*layout, *flags, *load, "--no-load-optim") as run:
        own_anew = train(run, 2)
    with opened(*layout, *load, "--no-load-optim") as run:
        adam_anew = train(run, 2)
    return {
        "differing": differing(own, adams),
        "tensors": len(own),
        "steps": (own_steps, adam_steps),
        "weights alone": (own_anew, adam_anew),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("forms"))


@pytest.fixture(scope="module")
def names(asked_for):
    return [name for name in FORMS if name in asked_for("form")]


# Each form has worlds of its own: gloo keeps the threads of every session's groups until a process ends.
@pytest.fixture(scope="module")
def trained(folder, names):
    ranks = {name: run_world(run_form, 2, folder, name, timeout=500) for name in names}
    return [{name: found[rank] for name, found in ranks.items()} for rank in range(2)]


FORM = pytest.mark.parametrize(
    "form", [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in FORMS]
)


@FORM
def test_a_run_resumes_bit_for_bit(trained, form):
    for rank in trained:
        resumed, went_on = rank[form]["resumed"]
        assert resumed == went_on
        assert went_on[0] != went_on[1]
    assert trained[0][form]["loaded"] == []


@FORM
def test_adamw_goes_on_from_its_checkpoint_bit_for_bit(trained, form):
    for rank in trained:
        resumed, went_on = rank[form]["resumed by AdamW"]
        if form != "half-up":
            assert resumed == went_on
    assert trained[0][form]["read by AdamW"] == []
    assert trained[0][form]["tensors"] == (3 if "--bf16" in FORMS[form][0] else 2) * 16


@FORM
def test_it_goes_on_from_a_checkpoint_of_adamw_bit_for_bit(trained, form):
    for rank in trained:
        resumed, went_on = rank[form]["resumed from AdamW"]
        if form != "half-up":
            assert resumed == went_on
    assert trained[0][form]["read from AdamW"] == []


@FORM
def test_it_trains_as_adamw_does(trained, form):
    if form == "half-up":
        return
    for rank in trained:
        own, adams = rank[form]["trained"]
        assert own == adams
    assert trained[0][form]["equal to AdamW"] == []


@FORM
def test_another_layout_reads_the_same_state(trained, form):
    assert trained[0][form]["read under another layout"] == []


@pytest.fixture(scope="module")
def alone(trained, folder, names):
    return {name: run_world(read_alone, 1, folder, name, timeout=500)[0] for name in names}


@FORM
def test_one_process_reads_the_state_of_two_and_goes_on_as_adamw_does(alone, form):
    assert alone[form]["differing"] == []
    assert alone[form]["tensors"] in (2 * 16, 3 * 16)
    own, adams = alone[form]["steps"]
    if form != "half-up":
        assert own == adams


@FORM
def test_weights_loaded_alone_are_where_it_begins_as_adamw_does(alone, form):
    own, adams = alone[form]["weights alone"]
    if form != "half-up":
        assert own == adams
    assert own != alone[form]["steps"][0][:2]
