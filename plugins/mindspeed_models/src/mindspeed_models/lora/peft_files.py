"""peft's directories of adapters: which they are, and what their configuration says; without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mindspeed_core.errors import UserError

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"


@dataclass(frozen=True)
class PeftConfig:
    """The part of a configuration that decides what adapters compute.

    Attributes:
        rank: ``r``.
        alpha: ``lora_alpha``.
        dropout: ``lora_dropout``.
        targets: ``target_modules``.
        rank_stabilized: the factor is ``alpha / √r``.
        modules: ``modules_to_save``.
    """

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    rank_stabilized: bool = False
    modules: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """Return the factor of the updates."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


def is_peft(folder: str | Path) -> bool:
    """Return whether a folder is a peft directory."""
    return (Path(folder) / CONFIG).is_file()


def named(folder: str, name: str) -> str | None:
    """Return the peft directory: a folder, or its subfolder of an adapter's name; None for none."""
    places = (folder, str(Path(folder) / name))
    return next((place for place in places if is_peft(place)), None)


def read_config(folder: Path) -> PeftConfig:
    """Read the configuration of a peft directory.

    Raises:
        UserError: it cannot be read, or describes adapters that are none of these.
    """
    path = folder / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: is no configuration of adapters")
    kind = found.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{path}: peft_type {kind!r} is not LORA; only low-rank adapters are read")
    for name, why in _REFUSED.items():
        if found.get(name):
            raise UserError(f"{path}: {name} {_short(found[name])}: {why}")
    if found.get("bias", "none") != "none":
        raise UserError(f"{path}: bias {found['bias']!r}: biases of a base are not trained here")
    rank, alpha = found.get("r"), found.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise UserError(f"{path}: r {rank!r} and lora_alpha {alpha!r} are no rank and factor")
    targets = found.get("target_modules")
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise UserError(
            f"{path}: target_modules {_short(targets)} is no list of names; list the linears that have "
            "adapters"
        )
    if not (folder / WEIGHTS).is_file():
        pickled = (
            f"; {_PICKLED} is a pickle, convert it to safetensors" if (folder / _PICKLED).is_file() else ""
        )
        raise UserError(f"{folder}: has no {WEIGHTS}{pickled}")
    return PeftConfig(
        rank,
        float(alpha),
        float(found.get("lora_dropout") or 0.0),
        tuple(sorted(targets)),
        bool(found.get("use_rslora")),
        tuple(found.get("modules_to_save") or ()),
    )


_REFUSED = {
    "use_dora": "DoRA scales columns of the weight, which these adapters do not; train the adapter "
    "without it",
    "rank_pattern": "adapters have one rank; train them with one",
    "alpha_pattern": "adapters have one factor; train them with one",
    "fan_in_fan_out": "weights lie the other way round there; export it with fan_in_fan_out false",
    "layers_to_transform": "adapters stand in all layers; fill the others with zeros",
}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def config_json(
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: tuple[str, ...],
    base: str,
    modules: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return what ``adapter_config.json`` holds of adapters trained here."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": dropout,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(targets),
        "modules_to_save": list(modules) or None,
    }
