"""The ways to a model that generates: `load`, `from_pretrained` and `generating`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_megatron.unwrap import chunks_of
from mindspeed_models.inference.evaluation import evaluating
from mindspeed_models.inference.loaded import BATCH_SIZE, LoadedModel, OnText
from mindspeed_models.inference.opening import end_tokens, opening_of

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session
    from mindspeed_models.inference.adapters import LoadedAdapters
    from mindspeed_models.lora.adapter_files import Adapters

__all__ = ["BATCH_SIZE", "LoadedModel", "OnText", "from_pretrained", "generating", "load"]


def load(
    path: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    lora: Sequence[str | Path] = (),
    platform: str | None = None,
    flags: Sequence[str] = (),
    prefill_chunk: int = 0,
    batch_size: int = BATCH_SIZE,
    chat_template: str | None = None,
) -> LoadedModel:
    """Open a session in mode ``inference`` and load a model. Collective over all ranks.

    Args:
        path: a checkpoint of a training, a Hugging Face folder, or a checkpoint of Megatron-LM.
        tp: tensor-parallel size.
        pp: pipeline size.
        ep: expert-parallel size.
        lora: folders of adapters; requests name one by its folder's name.
        platform: ``cpu``, ``cuda`` or ``npu``; found out by default.
        flags: further flags of the host, such as ``--bf16`` or ``--tokenizer-model``.
        prefill_chunk: tokens of a prompt that are computed at once; 0 for all.
        batch_size: requests that are computed together at most.
        chat_template: name or file of a chat template; that of the tokenizer by default.

    Raises:
        UserError: one sentence that names the flag or file, its value and the way out.
    """
    from mindspeed_core.activation import prepare
    from mindspeed_megatron.launch.environment import of_one_process
    from mindspeed_train.interface import setup, teardown

    opening = opening_of(path, tp=tp, pp=pp, ep=ep, flags=flags)
    adapters, more = _adapters(lora, opening.description, flags)
    with ExitStack() as closing:
        closing.enter_context(of_one_process(os.environ))
        session = prepare([*opening.flags, *more], host="standalone", platform=platform, mode="inference")
        closing.enter_context(session)
        closing.push(partial(_leave, teardown, session))
        run = setup(session)
        closing.enter_context(evaluating(run))
        closing.callback(run.model.clear)
        model = LoadedModel(
            run,
            _ends(run, opening.description),
            adapters=_placed(run, adapters),
            prefill_chunk=prefill_chunk,
            batch_size=batch_size,
            chat_template=chat_template,
        )
        return model.own(closing)


def from_pretrained(
    model_provider: Any, pretrained_model_name_or_path: str | Path, **options: Any
) -> LoadedModel:
    """Load a model as the seed's ``from_pretrained`` does.

    Args:
        model_provider: accepted; the model's own files and ``flags`` say how it is built.
        pretrained_model_name_or_path: see `load`.
        options: see `load`.
    """
    return load(pretrained_model_name_or_path, **options)


@contextmanager
def generating(
    run: Run, *, model: Any = None, end_tokens: Sequence[int] | None = None, **options: Any
) -> Iterator[LoadedModel]:
    """Generate with the model of a training between two steps. Collective over all ranks.

    The weights are as the last step left them; when the block ends the model trains as if it had not been.

    Args:
        run: the run of a training, or of a session for a program's own loop.
        model: the chunks of such a program, which has no optimizer; those of the run by default.
        end_tokens: that end an answer; the tokenizer's by default.
        options: ``prefill_chunk``, ``batch_size`` and ``chat_template`` of `load`; in a library session also
            ``tokenizer`` and ``vocab_size``, the tokens that may be drawn.

    Raises:
        UserError: the model's sequences or weights are shared out over ranks.
    """
    if model is not None:
        run = replace(run, model=chunks_of(model))
    with ExitStack() as closing:
        closing.enter_context(evaluating(run))
        ends = _ends(run, None) if end_tokens is None else end_tokens
        with LoadedModel(run, ends, **options).own(closing) as loaded:
            yield loaded


def _leave(
    teardown: Callable[[Session], None], session: Session, kind: Any, error: BaseException | None, trace: Any
) -> None:
    """Leave the process group, unless other ranks do not know that this one leaves."""
    import torch.distributed as dist

    alone = not dist.is_initialized() or dist.get_world_size() == 1
    if error is None or alone or isinstance(error, UserError):
        teardown(session)


def _ends(run: Run, description: Path | None) -> list[int]:
    """Return the tokens that end an answer: as the model's files say, else the tokenizer's."""
    path = getattr(run.args, "tokenizer_model", None)
    found = end_tokens(description, Path(path) if path else None)
    if not found and path:
        found = [int(run.tokenizer.eod)]
    return found


def _adapters(
    folders: Sequence[str | Path], description: Path | None, flags: Sequence[str]
) -> tuple[dict[str, Adapters], list[str]]:
    """Read adapters, and return the flags of a model with room for them."""
    if not folders:
        return {}, []
    from mindspeed_models.families import described_folder
    from mindspeed_models.inference.adapters import flags_of, read_all

    given = dict(pairwise(flags)).get("--model-config")
    where = Path(given) if given else description
    read = read_all(folders, None if where is None else described_folder(where, None))
    return read, flags_of(read)


def _placed(run: Run, adapters: dict[str, Adapters]) -> LoadedAdapters | None:
    if not adapters:
        return None
    from mindspeed_models.inference.adapters import LoadedAdapters

    return LoadedAdapters(run, adapters)
