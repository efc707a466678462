"""Rules of communication backends on the lagging device, which refuses what HCCL or NCCL refuses.

Calls are read as process groups get them, so that those count too that do not pass through the functions of
``torch.distributed``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from mindspeed_megatron.backend_contracts.contract import REDUCTIONS, BackendContract
from mindspeed_megatron.backend_contracts.tensor_facts import CollectiveCall, TensorFacts, is_gloo_group
from mindspeed_testing.lagging.communication import Call, Rule

_AS: dict[str, tuple[str, tuple[str, ...]]] = {
    "_allgather_base": ("all_gather_into_tensor", ("output_tensor", "input_tensor")),
    "all_gather_single": ("all_gather_into_tensor", ("output_tensor", "input_tensor")),
    "allgather": ("all_gather", ("tensor_list", "tensor")),
    "allreduce": ("all_reduce", ("tensor",)),
    "allreduce_coalesced": ("all_reduce", ("tensor",)),
    "all_to_all_single": ("all_to_all_single", ("output", "input")),
    "alltoall": ("all_to_all", ("output_tensor_list", "input_tensor_list")),
    "alltoall_base": ("all_to_all_single", ("output", "input")),
    "broadcast": ("broadcast", ("tensor",)),
    "gather": ("gather", ("gather_list", "tensor")),
    "recv": ("recv", ("tensor",)),
    "recv_anysource": ("recv", ("tensor",)),
    "reduce": ("reduce", ("tensor",)),
    "_reduce_scatter_base": ("reduce_scatter_tensor", ("output", "input")),
    "reduce_scatter_single": ("reduce_scatter_tensor", ("output", "input")),
    "reduce_scatter": ("reduce_scatter", ("output", "input_list")),
    "scatter": ("scatter", ("tensor", "scatter_list")),
    "send": ("send", ("tensor",)),
    "barrier": ("barrier", ()),
}
"""Each method of a process group: the function of ``torch.distributed``, and names of its first arguments."""

_COALESCED: dict[str, str] = {
    "all_gather_single_coalesced": "all_gather_single",
    "allgather_coalesced": "allgather",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
"""Methods that take lists of what another one takes: each of their tensors is a call of it."""

_SPLITS = ("output_split_sizes", "input_split_sizes")


def rules_of(contracts: Sequence[BackendContract]) -> Rule:
    """Return a rule of the lagging device that holds every call to contracts.

    Args:
        contracts: of the backends that would serve the calls.

    Raises:
        BackendRefusal: in the call that breaks a rule.
    """

    def rule(call: Call) -> None:
        size = call.group.size()
        description = str(getattr(call.group, "group_desc", ""))
        if size == 1 or is_gloo_group(description):
            return
        for seen in _seen(call, description, size):
            for contract in contracts:
                contract.check(seen)

    return rule


def _seen(call: Call, group: str, size: int) -> Iterator[CollectiveCall]:
    """Yield the calls of ``torch.distributed`` that a call of a process group stands for."""
    single = _COALESCED.get(call.operation)
    if single is None:
        yield _call(call.operation, call.arguments, call, group, size)
        return
    for arguments in zip(*call.arguments[:2]):
        yield _call(single, arguments, call, group, size)


def _call(method: str, arguments: Sequence[Any], call: Call, group: str, size: int) -> CollectiveCall:
    operation, names = _AS[method]
    facts = tuple(fact for name, value in zip(names, arguments) for fact in _facts(name, value))
    splits = {}
    if operation == "all_to_all_single":
        given = dict(zip(_SPLITS, arguments[2:4]))
        # They may be arrays of numpy, which have no truth value.
        splits = {
            name: tuple(map(int, sizes)) for name, sizes in given.items() if sizes is not None and len(sizes)
        }
    reduce_op = _reduction(call) if operation in REDUCTIONS else ""
    return CollectiveCall(
        operation, group, size, facts, reduce_op, splits, from_any=method == "recv_anysource"
    )


def _facts(argument: str, value: Any) -> Iterator[TensorFacts]:
    if isinstance(value, Tensor):
        yield TensorFacts.of(argument, value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _facts(argument, one)


def _reduction(call: Call) -> str:
    given = (*call.arguments, *call.options.values())
    op = next((one.reduceOp for one in given if hasattr(one, "reduceOp")), None)
    # A ReduceOp wraps a RedOpType, which prints as "RedOpType.SUM".
    return "SUM" if op is None else str(getattr(op, "op", op)).rpartition(".")[2]
