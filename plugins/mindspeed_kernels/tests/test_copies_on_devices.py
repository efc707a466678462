"""Around the kernels of a device run no copies of activations, and no temporary of a weight's size.

On tensors without memory, so that the branches of a device are taken on every machine.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_core.activation import prepare
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_kernels.ops import npu_fusion_attention
from mindspeed_kernels.ops.npu_matmul_add import npu_matmul_add_fp32
from mindspeed_megatron.planned_kernels import kernels_of
from mindspeed_megatron.unwrap import unwrap
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags

SEQUENCE, BATCH, HEADS, WIDTH = 16, 2, 4, 8
KERNELS = {"flash": "_flash_attention", "cudnn": "_scaled_dot_product_cudnn_attention"}


class Work(TorchDispatchMode):
    """Notes every operator that computes or moves something: names, and sizes of what it makes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) else result
        if not func.is_view and isinstance(first, torch.Tensor):
            given = [item for item in args if isinstance(item, torch.Tensor)]
            fresh = all(first is not item and not shared(first, item) for item in given)
            if fresh and not any(first is item for item in (kwargs or {}).values()):
                self.found.append((func._schema.name.removeprefix("aten::"), tuple(first.shape)))
        return result

    def large(self, size):
        """Return the names of those that make at least so many elements."""
        return [name for name, shape in self.found if torch.Size(shape).numel() >= size]


def shared(one, other):
    if isinstance(one, torch._subclasses.FakeTensor):
        return one is other
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def projected(layout):
    """Queries, keys and values as megatron-core hands them over: parts of one projection."""
    shape = (SEQUENCE * BATCH,) if layout == "TND" else (SEQUENCE, BATCH)
    mixed = torch.empty(*shape, HEADS, 3 * WIDTH, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return mixed, mixed.split(WIDTH, dim=-1)


@pytest.mark.parametrize("layout", ["SBND", "TND"])
@pytest.mark.parametrize("backend", KERNELS)
def test_attention_takes_and_leaves_tensors_as_they_lie(backend, layout):
    if (backend, layout) == ("cudnn", "TND"):
        # It is not asked for packed sequences.
        layout, lengths = "SBND", {"sparse_mode": 3}
    elif layout == "TND":
        ends = [SEQUENCE, SEQUENCE * BATCH]
        lengths = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends, "sparse_mode": 3}
    else:
        lengths = {"sparse_mode": 2}
    mixed, (query, key, value) = projected(layout)
    attend = npu_fusion_attention.backends[backend].function
    with Work() as forward:
        context = attend(query, key, value, HEADS, layout, scale=0.4, **lengths)[0].flatten(-2)
    size = BATCH * HEADS * SEQUENCE
    assert forward.large(size) == [KERNELS[backend] + ("_forward" if backend == "flash" else "")]
    gradient = torch.empty_like(context)
    with Work() as backward:
        torch.autograd.grad(context, mixed, gradient)
    # The three gradients become that of the projection they are parts of.
    assert backward.large(size) == [KERNELS[backend] + "_backward", "cat"]


def test_a_weight_gradient_is_added_up_on_a_device_without_a_temporary():
    with kernels_of("cuda"), FakeTensorMode():
        x, dy = (torch.empty(32, width, dtype=torch.bfloat16, device="cuda") for width in (16, 24))
        # Into float32 the same product is called; it needs a torch that was built for the device.
        weight = torch.empty(24, 16, dtype=torch.bfloat16, device="cuda")
        with Work() as work:
            npu_matmul_add_fp32(x, dy, weight)
    assert work.found == []


def weight_sized(sides):
    """Return the tensors of a weight's shape that a step's backward passes make, per side."""
    from mindspeed_train import loop

    found = {}
    for side, flags in sides.items():
        with prepare([*training_flags(flags, 2)], host=DEFAULT_HOST, platform="cpu") as session:
            run = loop.setup(session)
            shapes = {tuple(p.shape) for p in unwrap(run.model[0]).decoder.layers.parameters() if p.ndim == 2}
            with Work() as work:
                session.call("train_step", run=run)
            shapes |= {shape[::-1] for shape in shapes}
            found[side] = [name for name, shape in work.found if shape in shapes]
            loop.teardown(session)
    return found


def test_linear_layers_make_no_weight_gradient_of_their_own_in_a_step():
    model = (
        *("--num-layers", "1", "--swiglu", "--disable-bias-linear", "--ffn-hidden-size", "112"),
        *("--global-batch-size", "3", "--bf16", "--use-distributed-optimizer"),
    )
    fused = (*model, "--use-gradient-accumulation-fusion")
    ((plain, in_place),) = [tuple(run_world(weight_sized, 1, {"plain": model, "fused": fused})[0].values())]
    # Four linear layers and three micro-batches.
    assert plain.count("mm") == 12
    # megatron-core hands autograd a tensor that nobody fills.
    assert set(in_place) <= {"empty"}
    assert len(in_place) == 12
