"""Our own dump: one line of JSON for every tensor that a module returns, and for its gradient.

Lines are written as modules end, children before parents, so that a step that fails has dumped everything up
to there. Layers have their number in the whole model in their names, whatever stage holds them.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_megatron.instruments.passes import RECOMPUTED, current_pass
from mindspeed_megatron.unwrap import unwrap
from mindspeed_profile.dump_options import DumpOptions
from mindspeed_profile.lines_file import LinesFile

if TYPE_CHECKING:
    from mindspeed_core.run import Run

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"^((?:.*\.)?layers)\.(\d+)(?=\.|$)")
_GROUPS = ("tp", "pp", "dp", "cp", "ep")


def dump_name(rank: int) -> str:
    """Return the file name of a rank's dump."""
    return f"rank{rank:05d}.jsonl"


class ModuleDump:
    """Hooks on every module during the steps that are dumped, and none at other times."""

    def __init__(self, run: Run, options: DumpOptions) -> None:
        """Open the file on ranks that dump; an earlier dump of the folder is moved aside."""
        rank = run.dist.rank
        self._steps = options.steps or (run.iteration,)
        self._modules = options.modules
        self._file: LinesFile | None = None
        if not options.ranks or rank in options.ranks:
            self._file = LinesFile(options.path / dump_name(rank), "--npu-datadump")
            self._file.add({"rank": rank, "layout": _layout(run), "version": 1})
        self._calls: Counter[tuple[str, str]] = Counter()
        self._step = -1

    @contextmanager
    def step(self, run: Run) -> Iterator[None]:
        """Dump the body, one training step, if it is chosen."""
        if self._file is None or self._file.closed or run.iteration not in self._steps:
            yield
            return
        self._calls.clear()
        self._step = run.iteration
        hooks = [
            module.register_forward_hook(partial(self._dump_outputs, name))
            for chunk in run.model
            for name, module in _named_modules(unwrap(chunk), _stage(run, chunk))
            if self._wanted(name)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _wanted(self, name: str) -> bool:
        return not self._modules or any(part in name for part in self._modules)

    def _dump_outputs(self, name: str, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        # A forward that is run again gives nothing new, but the tensors whose gradients come.
        run = current_pass()
        call = self._calls[name, run]
        self._calls[name, run] += 1
        for place, tensor in enumerate(_tensors(outputs)):
            if run != RECOMPUTED:
                self._write(name, "forward", call, place, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._write, name, "backward", call, place))

    def _write(self, name: str, direction: str, call: int, place: int, tensor: torch.Tensor) -> None:
        if self._file is None or self._file.closed:
            return
        entry = {"step": self._step, "module": name, "pass": direction, "call": call, "tensor": place}
        self._file.add({**entry, **statistics(tensor)})


@torch.no_grad()
def statistics(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what identifies a tensor: dtype, shape, numbers of its finite values, and those of no value.

    Keys: ``dtype``, ``shape``, ``min``, ``max``, ``mean``, ``l2`` (None without a finite value), ``nan``,
    ``inf`` (how many) and ``crc32`` (of the bytes). Waits for the device.
    """
    values = tensor.detach().to("cpu").contiguous()
    found: dict[str, Any] = {
        "dtype": str(values.dtype).removeprefix("torch."),
        "shape": list(values.shape),
        "crc32": zlib.crc32(values.flatten().view(torch.uint8).numpy().tobytes()),
    }
    numbers = values.double().flatten()
    finite = numbers[torch.isfinite(numbers)]
    some = finite.numel() > 0
    return found | {
        "nan": int(torch.isnan(numbers).sum()),
        "inf": int(torch.isinf(numbers).sum()),
        "min": finite.min().item() if some else None,
        "max": finite.max().item() if some else None,
        "mean": finite.mean().item() if some else None,
        "l2": finite.norm().item() if some else None,
    }


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        # A bias that is left to others to add is not computed here.
        if outputs.is_floating_point() and not isinstance(outputs, torch.nn.Parameter):
            yield outputs
    elif isinstance(outputs, (list, tuple)):
        for one in outputs:
            yield from _tensors(one)


def _stage(run: Run, chunk: Any) -> str:
    """Return which part of the model a chunk is; empty where it is the whole."""
    if run.pg.pp.size() == 1:
        return ""
    return f" (stage {run.pg.pp.rank()}, chunk {getattr(unwrap(chunk), 'vp_stage', None) or 0})"


def _named_modules(chunk: torch.nn.Module, stage: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules of a chunk, layers under their number in the whole model, counted from 0.

    What holds the layers of a stage has the stage in its name: another stage's holds others.
    """
    holders = {name.rpartition(".")[0] for name, _ in chunk.named_modules() if name.endswith("layers")}
    numbers = {
        name: module.layer_number
        for name, module in chunk.named_modules()
        if _LAYER.fullmatch(name) and isinstance(getattr(module, "layer_number", None), int)
    }
    for name, module in chunk.named_modules():
        found = _LAYER.match(name)
        if found and found.group(0) in numbers:
            whole = f"{found.group(1)}.{numbers[found.group(0)] - 1}"
            name = whole + name[found.end() :]
        if name:
            yield name + (stage if name in holders else ""), module


def _layout(run: Run) -> dict[str, list[int]]:
    """Return rank and size of each dimension of the layout."""
    groups = {name: getattr(run.pg, name, None) for name in _GROUPS}
    return {name: [group.rank(), group.size()] for name, group in groups.items() if group is not None}
