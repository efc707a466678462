"""Attention of megatron-core 0.15 with a split batch of one sample.

megatron-core before 0.16 takes every described batch for one packed sequence and drops the dimension of the
samples where there is one. The built modules get another ``forward``, which keeps the description from that
code and hands it to the core attention of the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.attention import SelfAttention
from packaging.version import Version
from torch import Tensor

from mindspeed_cp.modules.batch import SplitBatch

if TYPE_CHECKING:
    from mindspeed_core.session import Session

OWNER = "context-parallel"
_PACKED_ONLY = Version("0.16")
"""From here on only packed sequences lose the dimension."""


def keep_samples(session: Session, model: list[Any]) -> None:
    """Let a batch of one sample keep its dimension in every attention; taken back when the session closes."""
    if Version(version("megatron-core")) >= _PACKED_ONLY:
        return
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, SelfAttention):
                described = _DescribedAttention(module)
                session.instances.set(OWNER, module, "forward", described.forward)
                session.instances.set(
                    OWNER, module, "_checkpointed_attention_forward", described.checkpointed
                )
                session.instances.set(OWNER, module.core_attention, "forward", described.core)


class _DescribedAttention:
    """One attention, and the description of the batch in its current call."""

    def __init__(self, module: SelfAttention) -> None:
        self._forward: Callable[..., Any] = module.forward
        self._checkpointed: Callable[..., Any] = module._checkpointed_attention_forward
        self._core: Callable[..., Any] = module.core_attention.forward
        self._batch: SplitBatch | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """Attend, see megatron-core's module; the description is given by name, as its layers do."""
        described = options.get("packed_seq_params")
        if not isinstance(described, SplitBatch):
            return self._forward(hidden_states, *args, **options)
        self._batch = described
        try:
            return self._forward(hidden_states, *args, **{**options, "packed_seq_params": None})
        finally:
            self._batch = None

    def checkpointed(self, *args: Any, **options: Any) -> Any:
        """Attend so that backward, when other batches may have passed, finds the description of this one."""
        return self._checkpointed(*args, **self._described(options))

    def core(self, *args: Any, **options: Any) -> Any:
        """Attend with the description that the call was given, or that of the call around it."""
        return self._core(*args, **self._described(options))

    def _described(self, options: dict[str, Any]) -> dict[str, Any]:
        given = options.get("packed_seq_params")
        return {**options, "packed_seq_params": given if given is not None else self._batch}
