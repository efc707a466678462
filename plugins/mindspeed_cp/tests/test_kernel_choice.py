"""The choice among kernels: by what they can compute, by priority, and by what other packages bring."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from mindspeed_core.activation import prepare
from mindspeed_core.feature import DeclarationError
from mindspeed_cp.engine.attention import CallOptions, Members, split_attention
from mindspeed_cp.engine.kernels import (
    Case,
    add_kernel,
    choice,
    known_kernels,
)
from mindspeed_cp.engine.kernels.cuda import CudaFlashKernel
from mindspeed_cp.engine.kernels.products import ProductsKernel
from mindspeed_cp.engine.masks import CAUSAL, FULL, MASKED, MaskRule
from mindspeed_cp.engine.planners import Grid
from mindspeed_cp.modules import core_attention
from mindspeed_cp.modules.batch import SplitBatch
from mindspeed_cp.options import CPOptions, cp_options
from mindspeed_testing.model_flags import training_flags


def case(**given_):
    facts = {"kind": CAUSAL, "band": False, "square": True, "device": "npu", "dtype": torch.bfloat16}
    facts |= {"heads": 8, "key_heads": 2, "width": 64, "value_width": 64, "bias": False, "dropout": False}
    return Case(**{**facts, **given_})


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({}, "npu-fusion"),
        ({"bias": True}, "npu-fusion"),
        ({"kind": FULL, "square": False}, "npu-fusion"),
        ({"kind": FULL, "square": False, "bias": True}, "products"),
        ({"kind": MASKED}, "npu-fusion"),
        ({"dropout": True}, "products"),
        ({"dtype": torch.float64}, "products"),
        ({"value_width": 128}, "products"),
        ({"device": "cuda"}, "cuda-flash"),
        ({"device": "cuda", "kind": MASKED, "band": True}, "cuda-flash"),
        ({"device": "cuda", "kind": MASKED}, "products"),
        ({"device": "cuda", "dtype": torch.float32}, "products"),
        ({"device": "cuda", "width": 512}, "products"),
        ({"device": "cpu", "dtype": torch.float64}, "cpu-flash"),
        ({"device": "cpu", "dtype": torch.float16}, "products"),
        ({"device": "cpu", "dropout": True}, "products"),
        ({"device": "xpu"}, "products"),
    ],
)
def test_the_preferred_kernel_that_can_is_chosen(facts, name, monkeypatch):
    monkeypatch.setattr(CudaFlashKernel, "missing", lambda self: "")
    assert choice.choose(case(**facts)).name == name


def test_without_the_operators_npus_use_products_and_say_so(monkeypatch, caplog):
    monkeypatch.setattr("mindspeed_cp.engine.kernels.npu.find_spec", lambda name: None)
    monkeypatch.setattr(choice, "_logged", set())
    assert choice.choose(case()).name == "products"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "attention over split sequences on npu uses products; npu-fusion cannot: package mindspeed-kernels "
        "is not installed"
    ]


class Acme(ProductsKernel):
    """A kernel of somebody else's, preferred on CPUs."""

    name = "acme"
    devices = ("cpu",)
    priority = 50

    def __init__(self):
        self.calls = 0

    def forward(self, q, k, v, task, scores):
        self.calls += 1
        return super().forward(q, k, v, task, scores)


def test_another_package_adds_a_kernel(monkeypatch):
    acme = Acme()
    both = {"acme": acme, "again": acme}
    installed = SimpleNamespace(sound=lambda: both, distribution=lambda name: "acme-kernels", broken=[])
    monkeypatch.setattr(choice, "installed_extensions", lambda point: installed)
    monkeypatch.setattr(choice, "_kernels", dict(choice._kernels))
    monkeypatch.setattr(choice, "_chosen", {})
    monkeypatch.setattr(choice, "_loaded", False)
    tensors = [torch.randn(1, 2, 6, 4) for _ in range(3)]
    split_attention(*tensors, (MaskRule(6),), Members(0), CPOptions(Grid(1)), CallOptions(1.0))
    assert acme.calls == 1
    assert known_kernels()["acme"] is acme
    with pytest.raises(DeclarationError, match="'acme' already"):
        add_kernel(Acme())


def test_what_is_no_kernel_is_refused_with_the_reason():
    with pytest.raises(DeclarationError, match="not an instance"):
        choice.check_kernel(Acme)
    nameless = type("Nameless", (Acme,), {"name": None})()
    with pytest.raises(DeclarationError, match="has no name"):
        choice.check_kernel(nameless)
    apart = type("Apart", (Acme,), {"backward": lambda self, outer, q, k: None})()
    with pytest.raises(DeclarationError, match="'acme': backward takes one BackwardBlock"):
        choice.check_kernel(apart)


def test_flags_reach_the_kernels(monkeypatch):
    wanted = ("--use-fused-ring-attention-update", "--megatron-cp-in-bnsd", "--softmax-type", "off-by-one")
    flags = training_flags(("--context-parallel-size", "2", *wanted), 1)
    args = prepare(flags, platform="cpu", host="standalone").args
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, softmax_type="off-by-one")
    alone = SimpleNamespace(tp=SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    given_ = {"options": cp_options(args), "members": lambda: Members(0), "pg_collection": alone}
    module = core_attention.SplitCoreAttention(config, 1, AttnMaskType.causal, "self", **given_)
    seen = []
    monkeypatch.setattr(core_attention, "split_attention", lambda q, *rest: seen.append(rest[4:6]) or q)
    batch = SplitBatch(rules=(MaskRule(6),))
    module(*(torch.zeros(6, 1, 2, 4) for _ in range(3)), None, packed_seq_params=batch)
    ((options, call),) = seen
    assert (options.fused_update, options.kernel_layout, call.sink.tolist()) == (True, "BNSD", [0.0, 0.0])
