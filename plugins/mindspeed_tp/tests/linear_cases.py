"""Cases of linears that run in worlds: megatron-core's and a planned one, on the same weights and inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

import mindspeed_core
from mindspeed_tp.linears import PlannedColumn, PlannedRow
from mindspeed_tp.plan import Execution, LinearPlan

S, B, H, F = 16, 2, 8, 24
DIRECT = LinearPlan()


@dataclass(frozen=True)
class Case:
    """One linear, as a test describes it."""

    row: bool = False
    sp: bool = False
    bias: bool = True
    skip_bias_add: bool = False
    frozen: bool = False
    accumulate: bool = False
    expert: bool = False
    dtype: torch.dtype = torch.float32
    plan: LinearPlan = DIRECT


@dataclass
class Found:
    """The numbers of one call."""

    output: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor | None
    db: torch.Tensor | None


def in_session(work: Any, tp: int) -> Any:
    """Run ``work`` in a session on this world of ``tp`` tensor-parallel ranks."""
    flags = ["--tensor-model-parallel-size", str(tp), "--use-gradient-accumulation-fusion"]
    with mindspeed_core.activate(flags, platform="cpu"):
        dist.init_process_group("gloo") if not dist.is_initialized() else None
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        try:
            model_parallel_cuda_manual_seed(3)
            return work()
        finally:
            parallel_state.destroy_model_parallel()


def linear(case: Case, planned: bool) -> Any:
    """Build megatron-core's linear of a case, or the planned one."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    config = ModelParallelConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=case.sp and tp > 1,
        gradient_accumulation_fusion=case.accumulate,
        params_dtype=case.dtype,
        use_cpu_initialization=True,
    )
    named: dict[str, Any] = {
        "config": config,
        "init_method": torch.nn.init.normal_,
        "bias": case.bias,
        "skip_bias_add": case.skip_bias_add or case.expert,
        "is_expert": case.expert,
    }
    named |= {"plan": case.plan} if planned else {}
    torch.manual_seed(1)
    if case.row:
        module = (PlannedRow if planned else RowParallelLinear)(F, H, input_is_parallel=True, **named)
    else:
        module = (PlannedColumn if planned else ColumnParallelLinear)(H, F, gather_output=False, **named)
    module.weight.requires_grad_(not case.frozen)
    if case.bias:
        torch.nn.init.normal_(module.bias)
    if case.accumulate:
        module.weight.main_grad = torch.ones(module.weight.shape)
        module.weight.grad_added_to_main_grad = False
    return module


def called(case: Case, module: Any, calls: int = 1) -> Found:
    """Run a linear forward and backward on inputs that every kind of it gets alike."""
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), dist.get_rank()
    cut = tp if case.sp and not case.expert else 1
    whole = torch.Generator().manual_seed(5)
    own = torch.Generator().manual_seed(6 + rank)
    shape = (S, B, F // tp) if case.row else (S // cut, B, H)
    source = own if case.row or cut > 1 else whole
    for _ in range(calls):
        x = torch.randn(shape, generator=source).to(case.dtype).requires_grad_()
        output, bias = module(x)
        generator = whole if case.row and cut == 1 else own
        output.backward(torch.randn(output.shape, generator=generator).to(case.dtype))
    weight = module.weight
    dw = weight.main_grad if case.accumulate else weight.grad
    return Found(output.detach(), x.grad, dw, module.bias.grad if case.bias and bias is None else None)


def both(case: Case) -> tuple[Found, Found]:
    """Return what megatron-core's linear and the planned one give."""
    return called(case, linear(case, False)), called(case, linear(case, True))


def chunked(parts: int, executor: str = "parts") -> LinearPlan:
    """Return the plan of products in parts."""
    execution = Execution(executor, parts)
    return LinearPlan(gather=execution, reduce=execution, adjoint=execution)
