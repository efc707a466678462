"""Generations of the device, and the questions by which code tells them apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from mindspeed_testing.npu.stubs import SOC

PRODUCTS = {
    "310P": ("Ascend310P3", 202),
    "910B": ("Ascend910B1", 220),
    "910_93": ("Ascend910_9391", 250),
    "950": ("Ascend950PR_9599", 260),
}
"""A product of each generation by the runtime's name, and the number that torch_npu 2.13.0 gives it."""


def announced_soc() -> str:
    """Return the generation of the device that this process was started with."""
    product = os.environ.get(SOC, PRODUCTS["910B"][0])
    return next(soc for soc in PRODUCTS if product.startswith(f"Ascend{soc}"))


@contextmanager
def announcing(soc: str) -> Iterator[None]:
    """Answer questions for the device's name and number with those of a generation."""
    import torch
    import torch_npu

    name, number = PRODUCTS[soc]
    bf16 = soc != "310P"
    places = (torch.npu, torch_npu.npu.utils)  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for place in places:
            for function, answer in (
                ("get_device_name", name),
                ("get_soc_version", number),
                ("is_bf16_supported", bf16),
            ):
                if hasattr(place, function):
                    given = mock.Mock(return_value=answer)
                    stack.enter_context(mock.patch.object(place, function, given))
        yield
