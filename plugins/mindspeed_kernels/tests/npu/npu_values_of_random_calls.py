"""Every public operator on random calls on the value device, against a formula of its own."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from differential import attention, experts, products, quantized, ranks, rows  # noqa: F401
from differential.case import GENERATORS, WORLD_GENERATORS
from differential.judge import run_case

from mindspeed_kernels.ops import OPERATORS
from mindspeed_kernels.ops.availability import ascend_generation
from mindspeed_testing.npu import value_device
from mindspeed_testing.npu.kernels.contract import SOCS
from mindspeed_testing.npu.value_training import run_value_world, value_session

QUICK, THOROUGH = 8, 60
FOR_INFERENCE = ("npu_ffn",)
"""Operators whose kernel refuses arguments that require grad."""
DTYPES = {"310P": (torch.float32, torch.float16)}
"""Of generations that lack one of the usual three."""


def with_kernels(operator):
    """Return whether an operator has a backend of its own for the device."""
    return any(
        "npu" in backend.devices and "cpu" not in backend.devices for backend in operator.backends.values()
    )


def run_on_device(name, seeds, soc="910B"):
    dtypes = DTYPES.get(soc, (torch.float32, torch.bfloat16, torch.float16))

    def generator(draws):
        case = GENERATORS[name](draws)
        return replace(case, gradients=case.gradients and name not in FOR_INFERENCE)

    with value_device(soc=soc), as_chosen_anew():
        for seed in seeds:
            run_case(name, generator, seed, device="npu", dtypes=dtypes)


@contextmanager
def as_chosen_anew():
    """Forget before and after what was chosen for another generation: a process has devices of one."""

    def forget():
        ascend_generation.cache_clear()
        for operator in OPERATORS.values():
            operator._chosen.clear()

    forget()
    try:
        yield
    finally:
        forget()


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_an_operator_is_its_formula_on_the_device(name):
    run_on_device(name, range(QUICK))


@pytest.mark.thorough
@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_an_operator_is_its_formula_on_devices_of_every_generation(name, soc):
    run_on_device(name, range(THOROUGH), soc)


def test_every_operator_with_kernels_has_a_generator():
    without = {name for name, operator in OPERATORS.items() if with_kernels(operator)}
    assert sorted(without - set(GENERATORS) - set(WORLD_GENERATORS)) == []


def every_operator(count):
    """Return failures on this rank of two by operator, and how often each operation of the device ran."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [dist.group.WORLD, [dist.new_group([member]) for member in range(2)][rank]]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    failures = {}
    with value_session() as device:
        for name, generator in sorted(WORLD_GENERATORS.items()):
            for seed in range(count):
                failed = ranks.run_world_case(name, generator, seed, groups, device="npu", dtypes=dtypes)
                if failed:
                    failures[name] = failed
                    break
        counted = dict(device.operations)
    dist.destroy_process_group()
    return failures, counted


@pytest.fixture(scope="module")
def judged():
    return run_value_world(every_operator, 2, QUICK)


@pytest.mark.parametrize("name", sorted(WORLD_GENERATORS))
def test_an_operator_of_two_ranks_is_its_formula_on_the_device(name, judged):
    assert [failures[name] for failures, _ in judged if name in failures] == []


@pytest.mark.thorough
def test_operators_of_two_ranks_are_their_formulas_in_further_calls():
    judged = run_value_world(every_operator, 2, THOROUGH, timeout=600.0)
    assert [text for failures, _ in judged for text in failures.values()] == []
