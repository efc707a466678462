"""Programs of launch scripts that train no language model, and what to use for them here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from mindspeed_megatron.upstream.refused import HYBRID, OTHER_LANGUAGE_MODELS, REINFORCEMENT, VISION

if TYPE_CHECKING:
    from mindspeed_megatron.migrate.script import Launch

_OTHER_MODELS: Mapping[str, str] = {
    "pretrain_bert.py": OTHER_LANGUAGE_MODELS,
    "pretrain_t5.py": OTHER_LANGUAGE_MODELS,
    "pretrain_ict.py": OTHER_LANGUAGE_MODELS,
    "pretrain_retro.py": OTHER_LANGUAGE_MODELS,
    "pretrain_vision_*.py": VISION,
    "pretrain_vlm.py": VISION,
    "pretrain_llava.py": VISION,
    "pretrain_mamba.py": HYBRID,
    "pretrain_hybrid.py": HYBRID,
    "train_rl.py": REINFORCEMENT,
}
"""Trainings of other models, by the name of their program, with the reason why they are refused."""
_NO_TRAININGS: Mapping[str, str] = {
    "preprocess_data.py": "prepares data: use `mindspeed-models preprocess`",
    "convert_ckpt*.py": "converts weights: use `mindspeed-models convert` or `mindspeed-models export`",
    "convert.py": "converts weights: use `mindspeed-models convert` or `mindspeed-models export`",
    "inference*.py": "generates text: use `mindspeed-models generate`",
    "evaluation*.py": "evaluates a model: use `mindspeed-models evaluate`",
}
WAY_OUT = "keep Megatron-LM's script, with `import mindspeed_core.megatron_adaptor` (--host megatron-lm)"
"""The way out for a training of another model."""


def other_model(program: str) -> str:
    """Return why the training of a program is refused; empty for one of a language model."""
    return _of(program, _OTHER_MODELS)


def trainings(launches: Iterable[Launch]) -> tuple[list[Launch], list[str]]:
    """Return the launches that train, and a sentence on each of the others."""
    found: list[Launch] = []
    others: list[str] = []
    for launch in launches:
        purpose = _of(launch.program, _NO_TRAININGS)
        if purpose:
            others.append(f"line {launch.line} starts {launch.program}, which {purpose}")
        else:
            found.append(launch)
    return found, others


def _of(program: str, table: Mapping[str, str]) -> str:
    name = PurePosixPath(program).name
    return next((text for pattern, text in table.items() if fnmatchcase(name, pattern)), "")
