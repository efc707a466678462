"""Slices of a sequence: the order of their work in both directions, and what cannot be sliced."""

import pytest
import torch

from mindspeed_core.activation import plan_for
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_moe.features.ampipe_proofs import GATHERS
from mindspeed_moe.features.deepspeed_proofs import DEEPSPEED, NO_DROP
from mindspeed_moe.features.proofs import EP2, MODEL, OVERLAP, SHARED, TP2
from mindspeed_testing import run_world

INSTALLED = Registry.discover()
SLICES = 3
DEGREE = ("--ampipe-degree",)
AMPIPE = (*DEGREE, str(SLICES))
LENGTH = ("--seq-length", "48", "--max-position-embeddings", "48")
SHORT = ("--num-layers", "1", "--micro-batch-size", "1", "--global-batch-size", "2")
FORWARD = (
    *("attention 0", "dispatch 0 launch", "attention 1", "dispatch 1 launch"),
    *("dispatch 0 wait", "experts 0", "combine 0 launch"),
    *("attention 2", "dispatch 2 launch", "dispatch 1 wait", "experts 1", "combine 1 launch"),
    *("combine 0 wait", "dispatch 2 wait", "experts 2", "combine 2 launch"),
    *("combine 1 wait", "combine 2 wait"),
)


def recorded():
    """Train one step of one layer; return events of both directions, and whether odd lengths stay whole."""
    from unittest.mock import patch

    from megatron.core.transformer import TransformerLayer

    from mindspeed_core.activation import activate
    from mindspeed_moe import launch_wait
    from mindspeed_moe.sliced import layer
    from mindspeed_testing.model_flags import training_flags
    from mindspeed_train import loop

    events, seen = [], {}
    start, finish, attend = launch_wait.Exchange.start, launch_wait.Exchange.finish, layer.attend
    route, compute = layer.SlicedMoELayer.route, layer.SlicedMoELayer.compute

    def number(exchange):
        """Count the exchanges of a name in the order of their first launch."""
        known = seen.setdefault(exchange.name, [])
        if exchange not in known:
            known.append(exchange)
        return f"{exchange.name} {known.index(exchange)}"

    def new_start(self, rows, *, mirrored):
        self.direction = "B" if mirrored else "F"
        events.append(f"{self.direction} {number(self)} launch")
        return start(self, rows, mirrored=mirrored)

    def new_finish(self):
        events.append(f"{self.direction} {number(self)} wait")
        return finish(self)

    def watched(what, at, result):
        events.append(f"F {what} {at}")
        result.register_hook(lambda gradient: events.append(f"B {what} {at}"))

    def new_attend(*given):
        output, bias = attend(*given)
        watched("attention", seen.setdefault("slices", -1) + 1, output)
        seen["slices"] += 1
        return output, bias

    def new_route(self, hidden, logits):
        call = route(self, hidden, logits)
        call.at = seen["slices"]
        return call

    def new_compute(self, call):
        launch = call.launch_combine

        def new_launch(results):
            watched("experts", call.at, results)
            launch(results)

        call.launch_combine = new_launch
        compute(self, call)

    flags = (*MODEL, *EP2, *SHORT, *LENGTH, *AMPIPE)
    with (
        patch.object(launch_wait.Exchange, "start", new_start),
        patch.object(launch_wait.Exchange, "finish", new_finish),
        patch.object(layer, "attend", new_attend),
        patch.object(layer.SlicedMoELayer, "route", new_route),
        patch.object(layer.SlicedMoELayer, "compute", new_compute),
        activate(training_flags(flags, 1), host="standalone") as session,
    ):
        run = loop.setup(session)
        session.call("train_step", run=run)
        of_step = [event for event in events if "probs" not in event]
        sliced = next(
            part for part in run.model[0].modules() if isinstance(part, layer.SlicedTransformerLayer)
        )
        hidden = torch.randn(SLICES * 5 + 1, 1, 64)
        whole = TransformerLayer.forward(sliced, hidden)[0]
        same = torch.equal(sliced(hidden_states=hidden)[0], whole)
        loop.teardown(session)
    return of_step, same


@pytest.fixture(scope="module")
def ranks():
    return run_world(recorded, 2)


def directed(events, direction):
    return tuple(event[2:] for event in events if event.startswith(direction))


def test_rows_of_a_slice_travel_beside_attention_and_experts_of_others(ranks):
    for events, _ in ranks:
        assert directed(events, "F") == FORWARD


def test_backward_computes_every_slice_while_gradients_of_others_travel(ranks):
    for events, _ in ranks:
        flying, exposed = set(), []
        for event in directed(events, "B"):
            name, _, what = event.rpartition(" ")
            if what == "launch":
                flying.add(name)
            elif what == "wait":
                flying.remove(name)
            elif not flying:
                exposed.append(event)
        # The first slice is reached last, when nothing is left to travel.
        assert exposed in ([], ["attention 0"])


def test_a_sequence_that_slices_do_not_divide_is_computed_as_a_whole(ranks):
    assert all(same for _, same in ranks)


def planned(*flags, host="standalone"):
    made, _ = plan_for(
        [*MODEL[2:], *SHARED, "--seq-length", "32", *flags], platform="cpu", host=host, registry=INSTALLED
    )
    return made


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (AMPIPE, "--ampipe-degree 3 with --expert-model-parallel-size 1 has no communication to hide"),
        (
            (*EP2, *AMPIPE),
            "--ampipe-degree 3 does not divide --seq-length 32, which has to be a multiple of 3",
        ),
        ((*EP2, *TP2, *DEGREE, "32"), "which has to be a multiple of 64"),
        ((*EP2, *DEGREE, "0"), "--ampipe-degree 0 is no number of slices"),
        ((*EP2, *GATHERS), "--ampipe-tp-sp-comm-overlap is an option of --ampipe-degree"),
        ((*EP2, *DEGREE, "2", *GATHERS), "runs gathers of experts that are cut, and these are whole"),
        ((*EP2, *DEGREE, "2", *OVERLAP), "layer-schedule"),
        ((*EP2, *DEGREE, "2", "--moe-expert-capacity-factor", "1.0"), "a capacity would be that of a slice"),
        ((*EP2, *DEGREE, "2", *DEEPSPEED), "add --moe-no-drop without --moe-dynamic-padding"),
        ((*EP2, *DEGREE, "2", *NO_DROP, "--noisy-gate-policy", "RSample"), "losses would be those of other"),
        ((*EP2, *DEGREE, "2", "--fix-router"), "are others for each slice"),
        ((*EP2, *DEGREE, "2", "--moe-zero-memory", "level0"), "its experts belong to one call of a layer"),
        (
            (*EP2, *DEGREE, "2", "--recompute-granularity", "selective", "--recompute-modules", "core_attn"),
            "--ampipe-degree 2 with --recompute-granularity selective",
        ),
        ((*EP2, *DEGREE, "2", "--moe-shared-expert-overlap"), "the dispatcher calls no shared experts"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags, message):
    with pytest.raises(PlanError) as error:
        planned(*flags)
    assert message in str(error.value)


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
def test_every_host_takes_the_flags(host):
    made = planned(*EP2, *TP2, *DEGREE, "2", *GATHERS, host=host)
    assert {"moe-ampipe", "moe-core"} <= set(made.names)


def test_dropout_that_draws_other_numbers_is_noted():
    dropping = planned(*EP2, *DEGREE, "2", "--hidden-dropout", "0.1", "--attention-dropout", "0")
    assert any("what --hidden-dropout drops slice by slice" in str(said) for said in dropping.notes)
