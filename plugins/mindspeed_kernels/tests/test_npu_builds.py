"""Builds of torch_npu that lack a call or an argument: backends stand down with the reason."""

from types import SimpleNamespace

import pytest
import torch

from mindspeed_kernels import npu_builds
from mindspeed_kernels.npu_builds import call_missing
from mindspeed_kernels.ops import availability


@pytest.fixture
def older_build(monkeypatch):
    """Make the process look as if an older torch_npu had one operator, without the argument of later ones."""
    library = torch.library.Library("npu_of_2_9", "DEF")
    library.define("npu_grouped_matmul_add_(Tensor y, Tensor x, Tensor w, Tensor l) -> Tensor")
    operators = SimpleNamespace(npu_grouped_matmul_add_=torch.ops.npu_of_2_9.npu_grouped_matmul_add_)
    monkeypatch.setattr(npu_builds.torch.ops, "npu", operators, raising=False)
    monkeypatch.setattr(npu_builds, "version", lambda name: "2.9.0")
    monkeypatch.setattr(npu_builds, "import_module", lambda name: SimpleNamespace())
    monkeypatch.setattr(availability, "torch_npu_missing", lambda: "")
    monkeypatch.setattr(availability, "ascend_generation", lambda: "910B")
    call_missing.cache_clear()
    yield
    call_missing.cache_clear()


def test_an_argument_that_the_build_does_not_take_is_the_reason(older_build):
    missing = availability.kernel_of(
        "910B", calls=("npu_grouped_matmul_add_",), arguments=("group_list_type",)
    )

    assert missing() == (
        "torch_npu 2.9.0 takes no group_list_type in npu_grouped_matmul_add_; install a later build"
    )


def test_a_call_that_the_build_has_not_is_the_reason(older_build):
    missing = availability.kernel_of("910B", calls=("npu_ring_attention_update",))

    assert missing() == "torch_npu 2.9.0 has no npu_ring_attention_update; install a later build"


def test_a_call_that_the_build_takes_has_no_reason_against_it(older_build):
    assert availability.kernel_of("910B", calls=("npu_grouped_matmul_add_",))() == ""
