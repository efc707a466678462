"""Proofs of models by their configuration: one layout against another, and spellings against none."""

from __future__ import annotations

import json
from pathlib import Path

from mindspeed_core.feature import Resume, Scenario

_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_PP2 = ("--pipeline-model-parallel-size", "2")
_GIVEN = ("--model-config", "{files}")
_FILES = (f"{__name__}:write_config",)


def write_config(folder: Path) -> None:
    """Write the ``config.json`` of a LLaMA with the sizes of the small GPT of proofs."""
    content = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")


def _as_without(name: str, *flags: str) -> tuple[Scenario, ...]:
    """Return proofs of flags that leave the small GPT as it is: equal to it, also resumed in a layout."""
    return (
        Scenario(name, flags=flags, tolerance=0.0),
        Scenario("resume-tp2", flags=flags, resume=Resume(flags=(*flags, *_TP2), world_size=2)),
    )


RECIPE_PROOFS = (
    *(
        Scenario(
            name,
            flags=(*_GIVEN, *layout),
            baseline=_GIVEN,
            world_size=2,
            baseline_world_size=1,
            same_feature=True,
            files=_FILES,
        )
        for name, layout in (("tp2-sp", _TP2), ("pp2", _PP2))
    ),
    Scenario("resume-tp2", flags=_GIVEN, resume=Resume(flags=(*_GIVEN, *_TP2), world_size=2), files=_FILES),
)
# No row is padding: what a proof copies from its baseline are the rows of tokens alone.
PADDING_PROOFS = _as_without("as-it-is", "--pad-vocab-size-to", "128")
GATE_PROOFS = _as_without("no-change", "--no-add-gate")
