"""Parameters that ``--overlap-param-gather`` has not gathered yet, completed where somebody reads them.

Under the distributed optimizer each data-parallel rank updates its part of the parameters. With the overlap
the other parts arrive when the next forward pass calls the modules that hold them, so that code which reads
parameters elsewhere reads values from before the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel

from mindspeed_core.errors import SessionError


def complete_parameters(model: Sequence[Any], optimizer: Any = None) -> None:
    """Gather the updated parameters that have not been gathered yet; see `Run.complete_parameters`.

    Args:
        model: the chunks, in their wrappers of data parallelism.
        optimizer: the optimizer, whose chunks count too where ``model`` holds unwrapped ones.

    Raises:
        SessionError: parameters cannot be completed, or nobody knows the wrapper.
    """
    wrappers = _wrappers(model, optimizer)
    if not wrappers and optimizer is None:
        # An optimizer that shards its state knows the wrappers.
        _check_unwrapped(model)
    groups = [group for wrapper in wrappers for group in _overlapped(wrapper)]
    # megatron-core's own bookkeeping: what is gathered here is not gathered again by the next forward pass.
    for group in groups:
        shared = getattr(group.ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", False)
        if shared and not group.param_gather_dispatched:
            raise SessionError(
                "--reuse-grad-buf-for-mxfp8-param-ag: between steps updated parameters are nowhere complete; "
                "drop the flag, or the feature that reads them"
            )
    _start(groups)
    for group in groups:
        group.finish_param_sync(skip_next_bucket_dispatch=True)
    for wrapper in wrappers:
        if getattr(getattr(wrapper, "ddp_config", None), "use_megatron_fsdp", False):
            _complete_megatron_sharded(wrapper)


def start_gather(wrapper: Any, *unused: Any) -> None:
    """Start the gather of a chunk as its ``start_param_sync`` does, except of what is gathered already."""
    _start(_overlapped(wrapper))


def start_complete(model: Sequence[Any]) -> None:
    """Record that all parameters are complete, so that the first forward pass gathers nothing.

    A gather before the first update would give every rank the parts of others, and so hide ranks that were
    initialised or loaded differently.
    """
    for group in (group for wrapper in _wrappers(model, None) for group in _overlapped(wrapper)):
        group.param_gather_dispatched = True


def wait_for_parameters(*modules: torch.nn.Module) -> None:
    """Complete the parameters of modules whose weights a forward pass reads without calling them.

    Call it in the forward pass, before the read::

        def forward(self, hidden):
            wait_for_parameters(self.proj)
            return torch.nn.functional.linear(hidden, self.proj.weight)

    megatron-core's wrapper waits for the gather of a module's parameters when that module is called; this
    does the same without the call, by the same hooks, so it does nothing where parameters are complete.
    Under torch's FSDP2 and Megatron-FSDP it does nothing: they gather a whole transformer layer before its
    forward pass, so that what is in the layer may be read, and release it afterwards, so that another layer's
    weights must not be.

    Args:
        modules: modules inside the wrapped model; their submodules are waited for too.
    """
    for module in modules:
        for part in module.modules():
            for hook in part._forward_pre_hooks.values():
                if getattr(hook, "__module__", None) == DistributedDataParallel.__module__:
                    hook(part, ())


def _wrappers(model: Sequence[Any], optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "chained_optimizers", [optimizer])
    chunks = [*model, *(chunk for part in inner for chunk in getattr(part, "model_chunks", ()))]
    found = {id(wrapper): wrapper for chunk in chunks for wrapper in _chain(chunk)}
    return list(found.values())


def _chain(chunk: Any) -> Iterator[Any]:
    while chunk is not None:
        if isinstance(chunk, _BaseDataParallel):
            yield chunk
        chunk = getattr(chunk, "module", None)


def _start(groups: Sequence[Any]) -> None:
    for group in groups:
        if not group.param_gather_dispatched:
            group.start_param_sync()


def _overlapped(wrapper: Any) -> list[Any]:
    """Return the bucket groups whose gather is overlapped with the next forward pass."""
    if not isinstance(wrapper, DistributedDataParallel) or not wrapper.use_forward_hook:
        return []
    return [*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups]


def _complete_megatron_sharded(wrapper: Any) -> None:
    sharded, strategy = wrapper.module, wrapper.ddp_config.data_parallel_sharding_strategy
    if strategy == "optim_grads_params":
        sharded._replace_param_with_distributed_if_needed()
        return
    if strategy != "no_shard":
        sharded.start_param_sync(force_sync=True)
    sharded._replace_param_with_raw_if_needed()


def _check_unwrapped(model: Sequence[Any]) -> None:
    if not model:
        raise SessionError(
            "complete_parameters: the session knows no model; pass it to session.wrap_ddp, or to "
            "session.wrap_optimizer(optimizer, model)"
        )
    if any(hasattr(parameter, "main_grad") for chunk in model for parameter in chunk.parameters()):
        raise SessionError(
            "complete_parameters: the session knows the model without its wrapper of data parallelism; pass "
            "the wrapped one to session.wrap_optimizer(optimizer, model)"
        )
