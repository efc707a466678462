"""Several adapters beside one base: each request names one, and a batch computes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_core.errors import CheckpointError, UserError, guess
from mindspeed_models.lora.options import RANK, TARGETS, A, B

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_models.lora.adapter_files import Adapters
    from mindspeed_models.model_plan import ModelPlan
    from mindspeed_models.recipe import Recipe

NONE = ""
"""Name under which a request asks for the base alone."""


def read_all(
    folders: Sequence[str | Path], described: tuple[Recipe, ModelPlan] | None
) -> dict[str, Adapters]:
    """Read adapters; their names are those of their folders.

    Args:
        folders: of runs with adapters, or of peft.
        described: family and plan of the base, whose names peft's files have.

    Raises:
        UserError: one cannot be read, trains weights whole, or two have one name.
    """
    from mindspeed_models.lora.commands import load

    found: dict[str, Adapters] = {}
    for folder in map(Path, folders):
        name = folder.resolve().name
        if name in found:
            raise UserError(
                f"--lora-load {folder}: another adapter is called {name!r} too; rename its folder"
            )
        read = load(folder, described)
        if read.whole:
            raise UserError(
                f"--lora-load {folder}: trained {min(read.whole)} whole, which other requests share; "
                "merge it into the base (mindspeed-models merge-lora)"
            )
        found[name] = read
    return found


def flags_of(adapters: Mapping[str, Adapters]) -> list[str]:
    """Return the flags of a model that has room for each of the adapters."""
    targets = sorted({key.rpartition(".")[2] for each in adapters.values() for key in each.pairs})
    rank = str(_rank(adapters))
    # Each adapter's own factor is in its weights.
    return [TARGETS, *targets, RANK, rank, "--lora-alpha", rank]


class LoadedAdapters:
    """The adapters of a loaded model.

    Attributes:
        names: of the adapters; the first is that of requests which name none.
    """

    def __init__(self, run: Run, adapters: Mapping[str, Adapters]) -> None:
        """Take adapters for a run that was built with `flags_of` them. Collective.

        Raises:
            CheckpointError: one was trained beside another base.
        """
        from mindspeed_models.lora.base_digest import base_digest

        self.names = tuple(adapters)
        self._run = run
        rank = _rank(adapters)
        self._tensors = {name: _tensors(each, rank) for name, each in adapters.items()}
        self._used: str | None = None
        bases = {name: each.base for name, each in adapters.items() if each.base}
        digest = base_digest(run) if bases else ""
        for name, base in bases.items():
            if base != digest:
                raise CheckpointError(
                    f"--lora-load {adapters[name].where}: was trained beside another base ({base}) than this "
                    f"one ({digest}); load that one"
                )

    def check(self, name: str | None) -> None:
        """Refuse a name that no adapter has.

        Raises:
            UserError: lists those that there are.
        """
        if name not in (None, NONE, *self.names):
            raise UserError(
                f"adapter {name!r} is not loaded{guess(str(name), self.names)}; there are "
                f"{', '.join(self.names)}"
            )

    def use(self, name: str | None) -> None:
        """Compute with an adapter from now on; None is the first, the empty name none."""
        from mindspeed_models.lora.live import fill_adapters

        wanted = self.names[0] if name is None else name
        if wanted == self._used:
            return
        fill_adapters(self._run, self._tensors.get(wanted, {}), f"adapter {wanted!r}", lacking_is_zero=True)
        self._used = wanted


def _rank(adapters: Mapping[str, Adapters]) -> int:
    return max(pair.a.shape[0] for each in adapters.values() for pair in each.pairs.values())


def _tensors(adapters: Adapters, rank: int) -> dict[str, Tensor]:
    """Return weights by key, with the factor in ``B`` and zeros up to the common rank."""
    found: dict[str, Tensor] = {}
    for key, pair in adapters.pairs.items():
        lacking = rank - pair.a.shape[0]
        found[f"{key}.{A}"] = torch.nn.functional.pad(pair.a, (0, 0, 0, lacking))
        found[f"{key}.{B}"] = torch.nn.functional.pad(pair.b * adapters.scale, (0, lacking))
    return found
