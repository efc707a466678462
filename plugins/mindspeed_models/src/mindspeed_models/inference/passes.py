"""Forward passes of a model through its pipeline stages, with a cache of keys and values or without.

Every rank of a model calls the same methods. What is decided at the end of the pipeline (a token) is
broadcast from one rank, so that all of them go on alike whatever a device rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.unwrap import unwrap
from mindspeed_models.inference.masks import honours_masks

if TYPE_CHECKING:
    from mindspeed_core.run import Run


class Passes:
    """The model of a run, called stage by stage.

    Attributes:
        last: this rank has the last pipeline stage, where logits are.
        decides: this rank draws tokens: the first tensor-parallel one of the last stage.
        takes_masks: attention hides what a mask says; without, batches have texts of one length.
        vocab_size: logits of a position; padded rows are cut off.
        device: of the model.
    """

    def __init__(self, run: Run, vocab_size: int) -> None:
        """Take the model of a run, of which ``vocab_size`` tokens may be drawn.

        Raises:
            UserError: it has several chunks on a rank.
        """
        if len(run.model) != 1:
            raise UserError(
                f"generation: each pipeline rank has {len(run.model)} chunks of the model, and a generation "
                "passes each rank once; load the checkpoint without virtual stages and without schedules "
                "that place several chunks"
            )
        self.run = run
        self.config: Any = run.config
        self._model: Any = run.model[0]
        self.bare = unwrap(self._model)
        self.tp, self.pp = run.pg.tp, run.pg.pp
        self._first = self.pp.rank() == 0
        self.last = self.pp.rank() == self.pp.size() - 1
        self.decides = self.last and self.tp.rank() == 0
        self.vocab_size = vocab_size
        self.device = next(self.bare.parameters()).device
        self.takes_masks = bool(self._lowest(honours_masks(self.bare)))
        self._dtype = torch.float32 if self.config.fp32_residual_connection else self.config.params_dtype

    def forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, context: Any = None
    ) -> Tensor | None:
        """Compute one pass.

        Args:
            ids: ``[b, s]`` int64.
            positions: ``[b, s]`` int64, of each row's own text.
            mask: ``[b | 1, 1, s, keys]`` bool, True hides; None is causal, or everything that is cached.
            context: megatron-core's ``StaticInferenceContext``; its cache receives the keys. None without a
                cache.

        Returns:
            float32 logits on the last stage, else None: ``[b, 1, v]`` of the last position with a context,
            ``[b, s, v]`` without.
        """
        options: dict[str, Any] = {"runtime_gather_output": True}
        if context is not None:
            options["inference_context"] = context
        if not self._first:
            rows, length = ids.shape
            hidden = torch.empty(length, rows, self.config.hidden_size, dtype=self._dtype, device=self.device)
            dist.recv(hidden, group_src=self.pp.rank() - 1, group=self.pp)
            self.bare.set_input_tensor(hidden)
        output: Tensor = self._model(ids, positions, mask, **options)
        if not self.last:
            dist.send(output.contiguous(), group_dst=self.pp.rank() + 1, group=self.pp)
            return None
        return output[..., : self.vocab_size].float()

    def agree(self, values: Tensor) -> Tensor:
        """Give every rank of the model the values of the rank that decides; changes and returns them."""
        if self.last and self.tp.size() > 1:
            dist.broadcast(values, group_src=0, group=self.tp)
        if self.pp.size() > 1:
            dist.broadcast(values, group_src=self.pp.size() - 1, group=self.pp)
        return values

    def _lowest(self, value: bool) -> int:
        """Return the lowest value of all ranks of the model. Collective."""
        lowest = int(value)
        for group in (self.tp, self.pp):
            lowest = min(all_gather_values(lowest, group))
        return lowest

    def hidden_bytes(self, rows: int, length: int) -> int:
        """Return the bytes that one pass sends from a pipeline stage to the next one."""
        return rows * length * int(self.config.hidden_size) * self._dtype.itemsize
