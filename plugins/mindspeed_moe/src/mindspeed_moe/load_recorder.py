"""Counting of tokens per expert on the routers of a model, and their sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import Router
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_moe.load_log import LoadedModel, StepLoads, append_step, describe

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule


class LoadRecorder:
    """Counts the tokens of every expert, and writes them once a step from the first rank.

    A layer's counts stay on its device until a step ends; then one sum over all ranks brings them together.
    """

    def __init__(self, path: Path, model: LoadedModel, layers: int, *, writes: bool) -> None:
        """Begin the file on the first rank; every rank calls it.

        Args:
            path: of the file.
            model: what the file says of the run.
            layers: of the model, with those that predict further tokens.
            writes: False in a dry run, which has no numbers.

        Raises:
            UserError: the file cannot be written; on every rank.
        """
        self._path, self._model, self._writes = path, model, writes
        self._layers = layers
        self._counts: dict[int, Tensor] = {}
        if not writes:
            return
        problem = ""
        if dist.get_rank() == 0:
            try:
                describe(path, model)
            except UserError as error:
                problem = str(error)
        for said in all_gather_values(problem):
            if said:
                raise UserError(said)

    def watch(self, chunks: Sequence[MegatronModule]) -> Callable[[], None]:
        """Count on the routers of model chunks; returns what ends it."""
        handles = []
        self._device = next(chunks[0].parameters()).device
        for chunk in chunks:
            for name, module in chunk.named_modules():
                if isinstance(module, Router):
                    number = (module.layer_number or 1) - 1
                    # Layers that predict further tokens are numbered anew, behind the decoder's here.
                    number += module.config.num_layers if ".mtp." in f".{name}" else 0
                    handles.append(module.register_forward_hook(self._hook(number)))

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end

    def write(self, step: int) -> None:
        """Add up the counts of all ranks, and write those of a step; every rank calls it."""
        shape = self._layers, self._model.experts + 1
        total = torch.zeros(shape, dtype=torch.int64, device=self._device)
        for layer, counts in self._counts.items():
            total[layer] += counts
        self._counts.clear()
        dist.all_reduce(total)
        if not self._writes or dist.get_rank() != 0:
            return
        rows = {layer: row for layer, row in enumerate(total.tolist()) if row[-1]}
        if rows:
            loads = {layer + 1: row[:-1] for layer, row in rows.items()}
            append_step(
                self._path, StepLoads(step, {layer + 1: row[-1] for layer, row in rows.items()}, loads)
            )

    def _hook(self, layer: int) -> Callable[[Any, Any, Any], None]:
        def count(module: Any, inputs: Any, result: Any) -> None:
            # The first forward of a layer that is recomputed has no gradients: each token counts once.
            if not (module.training and torch.is_grad_enabled()):
                return
            routing_map = result[1].detach()
            if module.config.moe_pad_expert_input_to_capacity:
                # Rows that fill an expert up are in the map too, without a weight.
                routing_map = routing_map & (result[0].detach() != 0)
            chosen = routing_map.shape[0] * module.config.moe_router_topk
            counts = torch.nn.functional.pad(routing_map.sum(0), (0, 1), value=chosen)
            before = self._counts.get(layer)
            self._counts[layer] = counts if before is None else before + counts

        return count
