"""Attention of blocks on the device: what torch_npu is asked for, forward, backward and to join blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mindspeed_cp.engine.attention import CallOptions, Members, split_attention
from mindspeed_cp.engine.kernels import Case
from mindspeed_cp.engine.kernels.choice import choose
from mindspeed_cp.engine.masks import FULL, MaskRule
from mindspeed_cp.engine.merging import FusedMerger
from mindspeed_cp.engine.planners import Grid
from mindspeed_cp.engine.scores import Dropout
from mindspeed_cp.options import CPOptions
from mindspeed_testing.npu import Call, fake_npu, run_call

LENGTH, HEADS, GROUPS, WIDTH, NARROW = 1024, 8, 2, 64, 48
MATRIX = np.random.default_rng(0).random((LENGTH, LENGTH)) < 0.5
RULES = {
    "causal": MaskRule(LENGTH),
    "full": MaskRule(LENGTH, causal=False),
    "window": MaskRule(LENGTH, window=100),
    "documents": MaskRule(LENGTH, ends=(3, 10, 500, LENGTH)),
    "given": MaskRule(LENGTH, causal=False, matrix=MATRIX),
}


def attend(rule, layout="SBH", dropout=None):
    def function(query, key, value):
        options, call = CPOptions(Grid(1), kernel_layout=layout), CallOptions(0.125, dropout=dropout)
        return split_attention(query, key, value, (rule,), Members(0), options, call)

    def inputs(npu):
        sizes = (HEADS, WIDTH), (GROUPS, WIDTH), (GROUPS, NARROW)
        return [npu.tensor(2, heads, LENGTH, width, requires_grad=True) for heads, width in sizes]

    return function, inputs


@pytest.mark.parametrize("layout", ["SBH", "BNSD"])
@pytest.mark.parametrize("rule", RULES)
def test_every_mask_has_its_shapes_and_gradients(rule, layout):
    function, inputs = attend(RULES[rule], layout=layout)
    fused = ("npu_fusion_attention", "npu_fusion_attention_grad")
    run_call(Call(f"{rule} {layout}", function, inputs, like=function, operations=fused))


def test_slopes_go_to_the_second_version_of_the_kernel():
    def function(query, key, value, slopes):
        options, call = CPOptions(Grid(1)), CallOptions(0.125, slopes=slopes)
        return split_attention(query, key, value, (RULES["causal"],), Members(0), options, call)

    def inputs(npu):
        # The shape function of this version takes the context to be as wide as queries.
        tensors = [npu.tensor(2, n, LENGTH, WIDTH, requires_grad=True) for n in (HEADS, GROUPS, GROUPS)]
        return [*tensors, npu.tensor(HEADS, dtype=torch.float32)]

    fused = ("npu_fusion_attention_v2", "npu_fusion_attention_grad_v2")
    run_call(Call("slopes", function, inputs, operations=fused))


def test_dropped_weights_and_wide_values_are_left_to_products():
    function, inputs = attend(RULES["causal"], dropout=Dropout(0.1, 3))
    result = run_call(Call("dropout", function, inputs))
    assert not any("fusion_attention" in name for name in result.operations)


def test_the_update_joins_blocks_on_the_device():
    with fake_npu() as npu, torch.no_grad():
        merger = FusedMerger(npu.tensor(2, HEADS, 64, WIDTH), NARROW)
        for rows in ((0, 64), (32, 64)):
            size = rows[1] - rows[0]
            output = npu.tensor(2, HEADS, size, NARROW)
            merger.add(slice(0, 2), rows, output, npu.tensor(2, HEADS, size, dtype=torch.float32))
        assert npu.count("npu_ring_attention_update") == 1
        assert tuple(merger.output.shape) == (2, HEADS, 64, NARROW)
        assert tuple(merger.logsum.shape) == (2, HEADS, 64)


def test_the_fused_kernel_is_chosen():
    facts = {"kind": FULL, "band": False, "square": False, "device": "npu", "dtype": torch.bfloat16}
    sizes = {"heads": HEADS, "key_heads": GROUPS, "width": WIDTH, "value_width": NARROW}
    assert choose(Case(**facts, **sizes, bias=False, dropout=False)).name == "npu-fusion"
