"""AdamW in one launch over all parameters, and the scaling of gradients in one.

Torch's fused kernel reads and writes each number once; its default passes over them a dozen times and makes
temporary copies. megatron-core scales gradients one after the other, where neither TransformerEngine nor Apex
is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import utils as megatron_utils
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

from mindspeed_core.errors import UserError

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_FUSED = {"fused": True, "foreach": False}


def fuse_updates(session: Session, optimizer: Any, owner: str) -> None:
    """Let every Adam of torch inside a megatron-core optimizer update all of its parameters in one launch.

    Groups of parameters, state and checkpoints stay what they are. Adam of TransformerEngine or Apex is one
    launch already and stays as it is.

    Args:
        session: records the changes.
        optimizer: what the stage ``build_optimizer`` returned.
        owner: the feature's name.

    Raises:
        UserError: the update is none of Adam's.
    """
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in chained:
        if getattr(part, "is_stub_optimizer", False):
            continue
        inner = part.optimizer
        if type(inner) in (torch.optim.Adam, torch.optim.AdamW):
            session.instances.set(owner, inner, "step", _fused_step(inner))
        elif not type(inner).__module__.startswith(("transformer_engine.", "apex.")):
            kind = type(inner).__name__
            raise UserError(f"--use-fused-adam: the optimizer is {kind}, which updates by itself; drop it")


def _fused_step(inner: Any) -> Callable[..., Any]:
    plain = inner.step

    def step(closure: Any = None) -> Any:
        """Update with torch's fused kernel, whatever a checkpoint has put into the groups."""
        _own_counts(inner)
        before = [{name: group.get(name) for name in _FUSED} for group in inner.param_groups]
        for group in inner.param_groups:
            group.update(_FUSED)
        try:
            return plain(closure)
        finally:
            # Checkpoints hold the groups, and are read without this feature too.
            for group, values in zip(inner.param_groups, before):
                group.update(values)

    return step


def _own_counts(inner: Any) -> None:
    """Give every parameter a count of steps of its own where the parameter is, as the kernel wants it."""
    seen: set[int] = set()
    for parameter, state in inner.state.items():
        count = state.get("step")
        if count is None:
            continue
        if not isinstance(count, Tensor):
            state["step"] = torch.tensor(float(count), device=parameter.device)
        elif count.device != parameter.device or count.dtype != torch.float32 or id(count) in seen:
            state["step"] = count.to(parameter.device, torch.float32, copy=True)
        seen.add(id(state["step"]))


def with_one_launch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap megatron-core's scaling of a list of tensors; what TransformerEngine or Apex brings stays."""
    if original is not megatron_utils.local_multi_tensor_scale:
        return original

    def scale(
        chunk_size: int, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], factor: float
    ) -> None:
        """Write the first list, scaled, into the second."""
        sources, targets = (list(tensors) for tensors in tensor_lists)
        if all(source is target for source, target in zip(sources, targets)):
            torch._foreach_mul_(targets, factor)
        else:
            original(chunk_size, noop_flag, tensor_lists, factor)

    return scale
