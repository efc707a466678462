"""Gradients that are summed in float32: who else reduces, and what a session leaves."""

from state_runs import course
from torch import distributed as dist

from mindspeed_testing import run_world

FLAGS = ("--bf16", "--use-distributed-optimizer", "--quant-grads")


def reductions():
    """Tell which function buckets call before, in and behind a session, and torch's own in it."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    plain = dist.reduce_scatter_tensor
    before = buffers.dist_reduce_scatter_func
    with course(*FLAGS):
        inside = buffers.dist_reduce_scatter_func.__name__, dist.reduce_scatter_tensor is plain
    return before is plain, *inside, buffers.dist_reduce_scatter_func is plain


def test_only_buckets_sum_in_float32_and_only_while_the_session_is_open():
    (found,) = run_world(reductions, 1)
    assert found == (True, "reduce_scatter_with_fp32_accumulation", True, True)
