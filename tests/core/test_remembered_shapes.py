"""Operations of a dry run whose results are remembered: they make the second time what they made first."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_megatron.fake.tensors import ShapesOnly

CALLS = {
    "matrix product": lambda a, b: a @ b.t(),
    "sum of a column and a row": lambda a, b: a[:, :1] + b[:1],
    "other dtype": lambda a, b: a.to(torch.bfloat16),
    "integer beside a number": lambda a, b: a + 1,
    "view": lambda a, b: b.view(3, 4, 4).transpose(0, 1),
    "view of what a product shares": lambda a, b: torch.ops.aten._unsafe_view(a, [8, 6]),
    "parts": lambda a, b: a.split([2, 4]),
    "norm with its statistics": lambda a, b: torch.native_layer_norm(a, [8], None, None, 1e-5),
    "written in place": lambda a, b: a.add_(b),
    "largest with their places": lambda a, b: b.topk(3),
    "several joined": lambda a, b: torch.cat([a, b]),
    "rows by their numbers": lambda a, b: a[torch.zeros(5, dtype=torch.long)],
    "as long as another": lambda a, b: torch.zeros_like(a, dtype=torch.float64),
    "into another": lambda a, b: torch.mul(a, b, out=torch.empty(6, 8)),
}


def facts(result, *given):
    listed = result if isinstance(result, (list, tuple)) else (result,)
    storages = [one.untyped_storage()._cdata for one in given]
    return [
        (
            one.shape,
            one.stride(),
            one.storage_offset(),
            one.dtype,
            one.device,
            one.requires_grad,
            one.untyped_storage().nbytes(),
            [one is other for other in given],
            [one.untyped_storage()._cdata == storage for storage in storages],
        )
        for one in listed
    ]


def run(mode, call):
    a, b = torch.empty(6, 8), torch.empty(6, 8)
    return facts(call(a, b), a, b)


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_operation_itself(name):
    with FakeTensorMode() as mode:
        expected = run(mode, CALLS[name])
    with ShapesOnly() as mode:
        assert [run(mode, CALLS[name]) for _ in range(3)] == [expected] * 3


def test_other_arguments_are_other_calls():
    with ShapesOnly():
        a = torch.empty(4, 6)
        assert [(a * number).dtype for number in (2, 2.0)] == [torch.float32] * 2
        whole = torch.empty(4, 6, dtype=torch.long)
        assert [(whole * number).dtype for number in (2, 2.0, 2)] == [torch.int64, torch.float32, torch.int64]
        assert [a.sum(dim, keepdim).shape for dim, keepdim in ((0, False), (0, True), (1, False))] == [
            (6,),
            (1, 6),
            (4,),
        ]
        assert (a.t() + 0).stride() == (1, 6)
        assert (a.t().contiguous() + 0).stride() == (4, 1)


def test_new_results_share_no_storage():
    with ShapesOnly():
        a = torch.empty(4, 6)
        found = [a + 1 for _ in range(3)]
        assert len({one.untyped_storage()._cdata for one in found}) == 3


def test_a_remembered_view_is_one_of_the_tensor_that_is_given():
    with ShapesOnly():
        one, other = torch.empty(4, 6), torch.empty(4, 6)
        found = [tensor.view(24) for tensor in (one, other)]
        storages = [tensor.untyped_storage()._cdata for tensor in (one, other)]
        assert [view.untyped_storage()._cdata for view in found] == storages


def test_gradients_flow_through_remembered_results():
    with ShapesOnly():
        for _ in range(3):
            weight = torch.empty(3, 6, requires_grad=True)
            (torch.empty(4, 6) @ weight.t()).relu().sum().backward()
            assert weight.grad.shape == (3, 6)
