"""Planned linears equal megatron-core's: bit for bit where nothing is reordered."""

import logging
from dataclasses import replace
from itertools import product

import pytest
import torch
from linear_cases import Case, both, called, chunked, in_session, linear

from mindspeed_megatron.instruments.communication import count_communication
from mindspeed_testing import run_world
from mindspeed_tp.plan import DELAYED, LinearPlan

CASES = {
    "-".join(("row" if row else "column", *["sp"] * sp, *["bias"] * bias, *["skip"] * skip)): Case(
        row=row, sp=sp, bias=bias, skip_bias_add=skip
    )
    for row, sp, bias, skip in product((False, True), (False, True), (False, True), (False, True))
}
CASES |= {
    f"{kind}-{name}": replace(case, **change)
    for name, case in (("column", Case(sp=True)), ("row", Case(row=True, sp=True)))
    for kind, change in {
        "frozen": {"frozen": True, "bias": False},
        "in-place": {"accumulate": True},
        "bf16-in-place": {"accumulate": True, "dtype": torch.bfloat16},
        "expert": {"expert": True, "bias": False},
    }.items()
}
PARTS = {
    f"{name}-{executor}-{parts}": (replace(case, plan=chunked(parts, executor)))
    for name, case in (
        ("column", Case(sp=True)),
        ("row", Case(row=True, sp=True)),
        ("row-summed", Case(row=True)),
    )
    for executor, parts in (("parts", 1), ("parts", 2), ("parts", 4), ("parts", 8), ("ring", 1), ("fused", 1))
}


def put_away(delayed):
    """Call a linear inside of hooks on saved tensors, which make another tensor of its saved weight."""
    module, waiting = linear(delayed, True), []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: None)
    module.put_off_weight_gradients(lambda compute, *operands: waiting.append((compute, operands)))
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        found = called(delayed, module)
    ((compute, operands),) = waiting
    # Whoever takes them may move them to the host in between.
    compute(*(operand.clone() for operand in operands))
    return replace(found, dw=module.weight.grad), len(operands)


def compared(ranks):
    def work():
        found = {name: both(case) for name, case in (CASES | PARTS).items()}
        delayed, plain = Case(sp=True, plan=LinearPlan(weight_gradient=DELAYED)), Case(sp=True)
        later, now = linear(delayed, True), linear(plain, True)
        told = []
        later.register_wgrad_accumulation_and_reduce_hooks(lambda: told.append(later.weight.grad.clone()))
        second = called(delayed, later, calls=2)
        nothing_yet = later.weight.grad is None
        later.backward_dw()
        later.backward_dw()
        later.backward_dw()
        found["delayed"] = (called(plain, now, calls=2), replace(second, dw=later.weight.grad))
        apart, operands = put_away(delayed)
        found["delayed and put away"] = called(plain, linear(plain, True)), apart
        return found, nothing_yet, len(told), operands

    return in_session(work, ranks)


@pytest.fixture(scope="module", params=[1, 2, 4])
def world(request):
    return run_world(compared, request.param, request.param)


def same(one, other):
    return (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("name", [*CASES, "delayed", "delayed and put away"])
def test_a_direct_linear_is_megatron_cores_to_the_bit(world, name):
    for found, *_ in world:
        theirs, ours = found[name]
        for field in ("output", "dx", "dw", "db"):
            assert same(getattr(theirs, field), getattr(ours, field)), field


@pytest.mark.parametrize("name", PARTS)
def test_products_in_parts_equal_it_and_learn_the_same_weights_to_the_bit(world, name):
    for found, *_ in world:
        theirs, ours = found[name]
        torch.testing.assert_close(ours.output, theirs.output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.dx, theirs.dx, rtol=1e-5, atol=1e-5)
        assert same(theirs.dw, ours.dw)
        assert same(theirs.db, ours.db)


def test_a_delayed_gradient_exists_when_it_is_asked_for_and_its_hook_runs_once_for_each(world):
    for _, nothing_yet, told, _ in world:
        assert nothing_yet
        assert told == 2


def test_whoever_takes_a_delayed_gradient_gets_its_operands(world):
    assert {operands for *_, operands in world} == {2}


def counted(parts):
    """Count how many collectives of a call are under way while each of its products runs."""

    def work():
        flying = {}
        for name, case in (
            ("column", Case(sp=True, bias=False)),
            ("row", Case(row=True, sp=True, bias=False)),
            ("summed", Case(row=True, bias=False)),
        ):
            module = linear(replace(case, plan=chunked(parts)), True)
            with count_communication(computation=True) as log:
                called(case, module)
            meanwhile = [call.meanwhile for call in log.calls]
            flying[name] = sum(done is not None and done.flops > 0 for done in meanwhile), len(log.calls)
        frozen = linear(Case(sp=True, frozen=True, plan=chunked(parts)), True)
        with count_communication() as log:
            called(Case(sp=True, frozen=True), frozen)
        flying["frozen"] = [call.operation for call in log.calls]
        flying["order"] = [(call.operation, call.tensor_bytes) for call in log.calls]
        return flying

    return in_session(work, 2)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_all_but_one_collective_of_a_product_in_parts_hide_behind_products(parts):
    found = run_world(counted, 2, parts)
    for flying in found:
        hidden, calls = flying["column"]
        # Backward gathers the input beside one product and scatters beside another.
        assert (hidden - 2, calls - 2) == (parts - 1, parts)
        hidden, calls = flying["row"]
        assert (hidden, calls) == (2 * (parts - 1), 2 * parts)
        hidden, calls = flying["summed"]
        assert (hidden, calls) == (parts - 1, parts)
    assert found[0]["order"] == found[1]["order"]


def test_a_frozen_weight_costs_no_gather_of_its_input_in_backward():
    for flying in run_world(counted, 2, 1):
        assert flying["frozen"] == ["all_gather_into_tensor", "reduce_scatter_tensor"]


class Warnings(logging.Handler):
    """The texts of warnings."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def undivided():
    """Call a linear in 64 parts, of fewer rows than that on each rank, twice."""

    def work():
        heard = Warnings()
        logging.getLogger().addHandler(heard)
        case = Case(row=True, bias=False, plan=chunked(64))
        found = called(case, linear(case, True), calls=2), called(case, linear(case, False), calls=2)
        logging.getLogger().removeHandler(heard)
        return found, heard.texts

    return in_session(work, 2)


def test_rows_that_do_not_divide_run_whole_and_warn_once():
    for (ours, theirs), texts in run_world(undivided, 2):
        assert same(ours.output, theirs.output)
        assert same(ours.dw, theirs.dw)
        assert texts == ["32 rows do not divide into 64 parts: no overlap of communication"]
