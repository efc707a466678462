"""Attention of split sequences on the kernels of NPUs as their contracts state them, and what was asked."""

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mindspeed_testing.npu.stand_in import kernels_on_cpu

SCHEMAS = Path(__file__).resolve().parents[3] / "tests" / "npu_conformance" / "schemas.json"
CALLS: Counter = Counter()
"""Calls by operator, layout and sparse mode."""


def noted(name, function):
    """The same operator, whose calls are counted."""

    def call(*args, **given):
        layout = given.get("input_layout") or next(item for item in args if isinstance(item, str))
        CALLS[name, layout, given.get("sparse_mode", 0)] += 1
        return function(*args, **given)

    return call


@contextmanager
def recording():
    """Serve tensors on the host by the code for NPUs, and that by the kernels."""
    from mindspeed_cp.engine.kernels import using
    from mindspeed_cp.engine.kernels.npu import NpuKernel
    from mindspeed_kernels import ops

    chosen = ("npu_fusion_attention", "npu_fusion_attention_grad", "npu_ring_attention_update")
    with kernels_on_cpu(SCHEMAS):
        module = sys.modules["torch_npu"]
        for name in vars(module).keys() & {
            "npu_fusion_attention_v2",
            "npu_fusion_attention_grad_v2",
            *chosen,
        }:
            setattr(module, name, noted(name, getattr(module, name)))
        for name in chosen:
            operator = ops.OPERATORS[name]
            served = replace(operator.backends["npu"], name="recorded", devices=("cpu",), available=str)
            operator.add(served)
        try:
            with ops.use(**dict.fromkeys(chosen, "recorded")), using(NpuKernel(devices=("cpu",))):
                yield CALLS
        finally:
            for name in chosen:
                ops.OPERATORS[name].remove("recorded")
