"""Flags with which a session loads a model, by what its folder holds. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_core.errors import ArgumentError
from mindspeed_models.config_file import NAME as CONFIG
from mindspeed_models.starting_point import is_model_folder

_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_FROM_HF = "PretrainedFromHF"
_VERIFY = "--verify-checkpoint"
_MODEL_FLAGS = ("--model", "--model-config", "--use-checkpoint-args", "--num-layers")


@dataclass(frozen=True)
class Opening:
    """The start of a session that generates.

    Attributes:
        flags: of the host.
        description: folder whose ``config.json`` describes the model; None where none does.
    """

    flags: tuple[str, ...]
    description: Path | None = None


def opening_of(path: str | Path, *, tp: int, pp: int, ep: int, flags: Sequence[str]) -> Opening:
    """Return the flags that load a model, whoever wrote it.

    Args:
        path: a Hugging Face folder, a folder that a training or a conversion wrote, or one checkpoint in it.
        tp: tensor-parallel size.
        pp: pipeline size.
        ep: expert-parallel size.
        flags: further flags, which win.

    Raises:
        ArgumentError: there is nothing that can be loaded, or a size is no number of ranks.
    """
    given = [*_translated(flags)]
    layout = []
    for flag, size in (
        ("--tensor-model-parallel-size", tp),
        ("--pipeline-model-parallel-size", pp),
        ("--expert-model-parallel-size", ep),
    ):
        if size < 1:
            raise ArgumentError(flag, size, "is no number of ranks", "use 1 or more")
        if size > 1:
            layout += [flag, str(size)]
    loading, description = _loading(str(path), given)
    tokenizer = [] if _names_tokenizer(given) else _tokenizer_in(Path(path), description)
    return Opening((*loading, *layout, *tokenizer, *given), description)


def end_tokens(*folders: Path | None) -> list[int]:
    """Return the end tokens that ``generation_config.json`` or ``config.json`` of a folder names."""
    for folder in folders:
        for name in ("generation_config.json", CONFIG):
            found = _json(folder / name).get("eos_token_id") if folder is not None else None
            if isinstance(found, int) and not isinstance(found, bool):
                return [found]
            if isinstance(found, list) and found and all(type(each) is int for each in found):
                return list(found)
    return []


def chat_template_in(folder: Path) -> str:
    """Return the chat template that is saved with a tokenizer; empty for none."""
    template = folder / "chat_template.jinja"
    if template.is_file():
        return template.read_text(encoding="utf-8")
    found = _json(folder / "tokenizer_config.json").get("chat_template")
    return found if isinstance(found, str) else ""


def _loading(path: str, given: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the flags that name the weights and the model, and the folder that describes it."""
    if is_model_folder(path):
        return ["--load", path], Path(path)
    if not Path(path).is_dir() and "://" not in path:
        raise ArgumentError("--load", path, "is no folder", "name a checkpoint or a Hugging Face folder")
    # Not before: what follows reads a manifest.
    from mindspeed_models.weights.convert import HF
    from mindspeed_train.interface import find_checkpoint, find_single_checkpoint, publish

    described = any(flag.partition("=")[0] in _MODEL_FLAGS for flag in given)
    single = find_single_checkpoint(path)
    found = single or find_checkpoint(path, None, accept_unpublished=True)
    if found is None:
        raise ArgumentError(
            "--load", path, "holds no checkpoint", "name the folder that a training saved into"
        )
    kept = found.path / HF
    if (kept / CONFIG).is_file():
        model = [] if described else ["--model-config", str(kept)]
        return ["--pretrained-checkpoint", path, *model], kept
    model = [] if described else ["--use-checkpoint-args"]
    if found.manifest is None and not any(flag.partition("=")[0] == _VERIFY for flag in given):
        # The folder's own tracker names it: Megatron-LM has written it, and nothing to verify.
        model += [_VERIFY, "off"]
    if single is None:
        return ["--load", path, *model], None
    step = publish.iteration_of(found.path.name)
    if step is None:
        raise ArgumentError("--load", path, "is a checkpoint without a step", "name the folder that holds it")
    return ["--load", str(Path(path).parent), "--ckpt-step", str(step), *model], None


def _translated(flags: Sequence[str]) -> list[str]:
    """Return flags with the seed's names of tokenizers in those of the host."""
    found: list[str] = []
    words = iter(flags)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in ("--tokenizer-type", "--tokenizer-name-or-path", "--tokenizer-not-use-fast"):
            found.append(word)
            continue
        if name == "--tokenizer-not-use-fast":
            continue
        value = value if equals else next(words, "")
        if name == "--tokenizer-name-or-path":
            found += ["--tokenizer-model", value]
        elif value != _FROM_HF:
            found += [name, value]
    return found


def _names_tokenizer(flags: Sequence[str]) -> bool:
    names = {flag.partition("=")[0] for flag in flags}
    return bool(names & {"--tokenizer-model", "--vocab-file", "--tokenizer-type"})


def _tokenizer_in(*folders: Path | None) -> list[str]:
    for folder in folders:
        if folder is not None and any((folder / name).is_file() for name in _TOKENIZERS):
            return ["--tokenizer-model", str(folder)]
    return []


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        # What must be there is read, and complained about, elsewhere.
        return {}
    return found if isinstance(found, dict) else {}
