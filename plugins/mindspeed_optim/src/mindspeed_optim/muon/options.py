"""The options of Muon, from the arguments; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Coefficients = tuple[tuple[float, float, float], ...]
"""``a``, ``b`` and ``c`` of every step of the iteration."""
BLOCKWISE, DUPLICATED, DISTRIBUTED = "blockwise", "duplicated", "distributed"
"""Ways of tensor-parallel ranks with a matrix that they share: each its own part alone; each the whole;
the product together."""
TP_MODES = (BLOCKWISE, DUPLICATED, DISTRIBUTED)
SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")
PRECISIONS = ("low", "medium", "high")
ADAM, LION = "adam", "lion"
SCALAR_OPTIMIZERS = (ADAM, LION)
_STEPS = 5
SETS: dict[str, Coefficients] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Of Polar Express (arXiv 2505.16932), each divided by its safety factor 1.01 to the power of the degree.
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
"""Coefficients by name, as emerging-optimizers has them."""


@dataclass(frozen=True)
class MuonOptions:
    """Options of the rule.

    Attributes:
        momentum: weight of the old momentum in the new.
        nesterov: look ahead: orthogonalize the gradient's own share once more beside the momentum.
        split_qkv: orthogonalize query, key and value apart.
        split_gated: orthogonalize gate and up projection apart.
        scale_mode: one of `SCALE_MODES`.
        extra_scale: further factor of the update.
        precision: of matrix products, one of `PRECISIONS`.
        coefficients: of the iteration's steps.
        tp_mode: one of `TP_MODES`.
        scalar: rule for everything that is no matrix, one of `SCALAR_OPTIMIZERS`.
        lion_betas: of Lion.
    """

    momentum: float = 0.95
    nesterov: bool = False
    split_qkv: bool = True
    split_gated: bool = False
    scale_mode: str = "spectral"
    extra_scale: float = 1.0
    precision: str = "medium"
    coefficients: Coefficients = SETS["quintic"]
    tp_mode: str = BLOCKWISE
    scalar: str = ADAM
    lion_betas: tuple[float, float] = (0.95, 0.98)


def muon_options(args: Any) -> MuonOptions:
    """Return the options that the flags say; what a host has no default of is as in `MuonOptions`.

    Raises:
        ValueError: the steps do not fit the coefficients.
    """
    flags = {
        "momentum": "muon_momentum",
        "nesterov": "muon_use_nesterov",
        "split_qkv": "muon_split_qkv",
        "split_gated": "muon_split_gated",
        "scale_mode": "muon_scale_mode",
        "extra_scale": "muon_extra_scale_factor",
        "precision": "muon_fp32_matmul_prec",
        "tp_mode": "muon_tp_mode",
        "scalar": "muon_scalar_optimizer",
    }
    given = {option: getattr(args, name, None) for option, name in flags.items()}
    steps = getattr(args, "muon_num_ns_steps", None)
    return MuonOptions(
        **{option: value for option, value in given.items() if value is not None},
        coefficients=coefficients(args.muon_coefficient_type, _STEPS if steps is None else steps),
        lion_betas=(args.lion_beta1, args.lion_beta2),
    )


def coefficients(kind: str, steps: int) -> Coefficients:
    """Return the coefficients of as many steps.

    Those of Polar Express are a course from far to near, whose last step is repeated; those of the others
    begin again.

    Raises:
        ValueError: they would end in their midst, where singular values are still apart.
    """
    found = SETS[kind]
    if kind == "polar_express":
        if steps < len(found):
            raise ValueError(
                f"--muon-num-ns-steps {steps}: the coefficients of {kind} take {len(found)} steps or more; "
                f"give --muon-num-ns-steps {len(found)}, or another --muon-coefficient-type"
            )
        return found + found[-1:] * (steps - len(found))
    if steps < 1 or steps % len(found):
        raise ValueError(
            f"--muon-num-ns-steps {steps}: the coefficients of {kind} take a multiple of {len(found)} steps; "
            f"give --muon-num-ns-steps {len(found)}, or another --muon-coefficient-type"
        )
    return found * (steps // len(found))
