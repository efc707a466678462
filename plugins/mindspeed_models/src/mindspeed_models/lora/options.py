"""Options of adapters, as the arguments say them; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

NAME: Final = "lora"
"""Name of the feature, and of its record in checkpoints."""
TARGETS, RANK, ALPHA, DROPOUT = "--lora-target-modules", "--lora-r", "--lora-alpha", "--lora-dropout"
LOAD, SAVED, HOOKS = "--lora-load", "--lora-modules-to-save", "--lora-register-forward-hook"
ADAPTER, DTYPE = "--lora-adapter-name", "--lora-dtype"
MODEL, FP32 = "model", "fp32"
A, B = "lora_A", "lora_B"
"""Names of an adapter's parameters in the linear beside which it stands."""


@dataclass(frozen=True)
class AdapterOptions:
    """Options of one linear's adapter; they travel in the layer specification.

    Attributes:
        rank: of the update.
        scale: factor of the update, ``alpha / r``.
        dropout: of the adapter's input.
        seed: of the initial values, which depend on nothing else than this text: not on the layout.
        gated: the rows of the linear are gate and up projection behind each other.
    """

    rank: int
    scale: float
    dropout: float
    seed: str
    gated: bool = False


@dataclass(frozen=True)
class LoraOptions:
    """Options of all adapters.

    Attributes:
        roles: of the linears.
        rank: ``--lora-r``.
        alpha: ``--lora-alpha``.
        dropout: ``--lora-dropout``.
        modules: parts of the paths of parameters that are trained whole.
        in_fp32: adapters are float32 whatever the model is.
        ranks: other ranks, by role: of adapters of fused linears that were made of several.
    """

    roles: tuple[str, ...]
    rank: int
    alpha: float
    dropout: float
    modules: tuple[str, ...]
    in_fp32: bool
    ranks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, args: Any) -> LoraOptions:
        """Read the arguments.

        Raises:
            ValueError: a name means nothing.
        """
        from mindspeed_models.lora.targets import modules_of, roles_of

        return cls(
            roles_of(
                args.lora_target_modules or (), latent=bool(getattr(args, "multi_latent_attention", False))
            ),
            args.lora_r,
            float(args.lora_alpha),
            args.lora_dropout,
            modules_of(args.lora_modules_to_save or ()),
            args.lora_dtype == FP32,
        )

    @property
    def scale(self) -> float:
        """Return the factor of the updates."""
        return self.alpha / self.rank

    def of_linear(self, role: str, seed: str, *, gated: bool = False) -> AdapterOptions:
        """Return the options of one linear's adapter."""
        return AdapterOptions(self.ranks.get(role, self.rank), self.scale, self.dropout, seed, gated)
