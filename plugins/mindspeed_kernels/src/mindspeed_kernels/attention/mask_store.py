"""Attention masks as tensors, for kernels that want one: each made once per device and shared by all layers.

Kernels in the modes 2 to 4 and 6 to 8 expand a small mask themselves, whatever the length of the sequence:
4 MiB instead of one byte per query and key. Kernels that know the word causal need no tensor at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._guards import active_fake_mode

from mindspeed_kernels.attention.visibility import Visibility
from mindspeed_kernels.contract import ContractError

COMPRESSED = 2048
PREFIX_ROWS = 3072


@dataclass
class MaskStore:
    """Masks by kind and device; True hides.

    Attributes:
        given: a mask that somebody set for all attention, or None.
        on_host: keep the mask of all attention whole and on the host.
    """

    given: Tensor | None = None
    on_host: bool = False
    _made: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def causal(self, device: torch.device) -> Tensor:
        """Return ``[2048, 2048]``, the strict upper triangle."""
        seen = Visibility(COMPRESSED, COMPRESSED, 0, None, 0)
        return self._once(("causal", device), lambda: _hidden(seen, device))

    def prefix(self, device: torch.device) -> Tensor:
        """Return ``[3072, 2048]``: the strict upper triangle above 1024 rows whose right half is hidden."""

        def make() -> Tensor:
            tail = torch.zeros(PREFIX_ROWS - COMPRESSED, COMPRESSED, dtype=torch.bool, device=device)
            tail[:, COMPRESSED // 2 :] = True
            return torch.cat((self.causal(device), tail))

        return self._once(("prefix", device), make)

    def full(self, visibility: Visibility, device: torch.device) -> Tensor:
        """Return ``[sq, sk]`` of a visibility without mask tensor and prefix."""
        if visibility.hidden is not None or visibility.prefix:
            raise ValueError("a stored mask belongs to a band")
        band = visibility.offset, visibility.left, visibility.right
        name = ("full", visibility.sq, visibility.sk, *band, device)
        return self._once(name, lambda: _hidden(visibility, device))

    def given_on(self, device: torch.device) -> Tensor | None:
        """Return the mask that somebody set, on a device; copied there once."""
        mask = self.given
        if mask is None or mask.device == device:
            return mask
        return self._once(("given", id(mask), mask._version, device), lambda: mask.to(device))

    def reset(self) -> None:
        """Drop all masks and settings."""
        self.given, self.on_host = None, False
        self._made.clear()

    def forget(self, kind: str) -> None:
        """Drop the masks of one kind."""
        self._made = {name: made for name, made in self._made.items() if name[0] != kind}

    def _once(self, name: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        # Tensors with and without storage do not mix: those of a dry run belong to it alone, and what is
        # traced belongs to nobody.
        mode = active_fake_mode()
        made = self._made if mode is None else getattr(mode, "made_once", None)
        if made is None:
            return make()
        if name not in made:
            made[name] = make()
        return made[name]


def _hidden(visibility: Visibility, device: torch.device) -> Tensor:
    size = visibility.sq, visibility.sk
    visible = visibility.block((0, size[0]), (0, size[1]), device)
    return torch.zeros(size, dtype=torch.bool, device=device) if visible is None else ~visible[0, 0]


STORE = MaskStore()
"""The masks of this process."""


def set_attention_mask(mask: Tensor | None) -> None:
    """Let all attention hide what ``mask`` hides; None takes it back.

    Args:
        mask: ``[sq, sk]`` or ``[b | 1, n | 1, sq, sk]`` bool, True hides.

    Raises:
        ContractError: it is no such tensor.
    """
    if mask is not None and (mask.dtype != torch.bool or mask.dim() not in (2, 4)):
        raise ContractError(
            f"set_attention_mask: mask must be bool with 2 or 4 dimensions, got {mask.dtype} with "
            f"{mask.dim()}; nearest supported: [sq, sk] bool"
        )
    STORE.given = mask
    STORE.forget("given")


def get_attention_mask(sequence_length: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the mask of all attention: the one that was set, or the causal one in its small form.

    Args:
        sequence_length: number of queries and keys.
        device: where it is needed; with ``--attention-mask-on-cpu`` it is the whole mask on the host.
    """
    if STORE.given is not None:
        return STORE.given
    if STORE.on_host:
        return generate_attention_mask(sequence_length, compress=False, device="cpu")
    return generate_attention_mask(sequence_length, compress=True, device=device)


def generate_attention_mask(
    sequence_length: int, *, compress: bool = True, device: torch.device | str = "cpu"
) -> Tensor:
    """Build the causal mask, True hides: the small form that kernels expand, or all queries and keys.

    Args:
        sequence_length: number of queries and keys.
        compress: ``[2048, 2048]`` instead of ``[s, s]``.
        device: where it is needed.
    """
    place = torch.device(device)
    if compress:
        return STORE.causal(place)
    return STORE.full(Visibility(sequence_length, sequence_length, 0, None, 0), place)
