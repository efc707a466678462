"""The checkpoint that a run continues from or starts with, found once: before its model is built."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindspeed_core.errors import CheckpointError, UserError
from mindspeed_train.checkpoint import megatron_lm as checkpoint_megatron_lm
from mindspeed_train.checkpoint import publish
from mindspeed_train.checkpoint import source as checkpoint_source
from mindspeed_train.checkpoint.collective import on_first_rank
from mindspeed_train.checkpoint.common_state import read_common
from mindspeed_train.checkpoint.store_url import masked
from mindspeed_train.fault_tolerance import restart

if TYPE_CHECKING:
    from mindspeed_core.session import Session


@dataclass(frozen=True)
class Located:
    """Checkpoint that the flags lead to.

    Attributes:
        checkpoint: the one that they name; None where they name none.
        pretrained: it gives the weights alone, being that of ``--pretrained-checkpoint``.
        notes: what a user should know, once it is loaded.
    """

    checkpoint: publish.FoundCheckpoint | None
    pretrained: bool = False
    notes: tuple[str, ...] = ()


@dataclass
class _Kept:
    """Checkpoint that was found before the model was built, until it is loaded."""

    located: Located | None = field(default=None)


def locate(session: Session, args: Namespace) -> Located:
    """Find the checkpoint to load; the same until it is loaded. Collective.

    Raises:
        CheckpointError: there is none where one has to be.
    """
    kept = session.state(_Kept)
    if kept.located is None:
        kept.located = _locate(args)
    return kept.located


def forget(session: Session) -> None:
    """Search again at the next `locate`."""
    session.state(_Kept).located = None


def locate_source(args: Namespace, source: str) -> publish.FoundCheckpoint:
    """Find the checkpoint that a feature names: one checkpoint, or the latest of a folder. Collective."""
    single: publish.FoundCheckpoint | None = on_first_rank(
        masked(source), lambda: checkpoint_source.find_single(source)
    )
    return single or _find_in(args, source, source, None)


def saved_vocabulary(session: Session, args: Namespace) -> int | None:
    """Return how many ids take part in the softmax of the model that is going to be loaded. Collective.

    None where nothing is loaded, where it has another vocabulary, or where it does not say: then loading
    says what is wrong.
    """
    try:
        found = locate(session, args).checkpoint
        if found is None:
            return None
        model = _model_of(args, found)
    except UserError:
        # Told when it is loaded, unless a feature loads something else.
        forget(session)
        return None
    if model.get("vocab_size") not in (None, args.vocab_size):
        return None
    size = model.get("softmax_vocab_size") or model.get("padded_vocab_size")
    return size if isinstance(size, int) else None


def _model_of(args: Namespace, found: publish.FoundCheckpoint) -> dict[str, object]:
    if found.manifest is not None:
        return dict(found.manifest.model)
    if found.url:
        return {}

    def read() -> dict[str, object]:
        state = read_common(found.path, trusted=args.trust_checkpoint is True)
        common = checkpoint_megatron_lm.with_arguments(state)
        size = getattr(common.get("args"), "padded_vocab_size", None)
        return {"padded_vocab_size": size}

    model: dict[str, object] = on_first_rank(str(found.path), read)
    return model


def _locate(args: Namespace) -> Located:
    found: publish.FoundCheckpoint | None = on_first_rank(
        f"--save {args.save}", lambda: restart.own_checkpoint(args)
    )
    notes: list[str] = []
    if found is not None:
        restart.continue_from(args, found)
    elif args.load:
        found = _find(args, notes)
    pretrained = found is None and bool(args.pretrained_checkpoint)
    if pretrained:
        found = _find_pretrained(args, notes)
    return Located(found, pretrained, tuple(notes))


def _find(args: Namespace, notes: list[str]) -> publish.FoundCheckpoint | None:
    unpublished = args.verify_checkpoint == "off"
    found: publish.FoundCheckpoint | None = on_first_rank(
        f"--load {args.load}",
        lambda: checkpoint_source.find(args.load, args.ckpt_step, accept_unpublished=unpublished),
    )
    if found is None and not args.pretrained_checkpoint:
        if args.exit_on_missing_checkpoint or args.ckpt_step is not None:
            raise CheckpointError(f"--load {args.load}: holds no checkpoint; check the path")
        notes.append(f"--load {args.load}: holds no checkpoint; starting from scratch")
    return found


def _find_pretrained(args: Namespace, notes: list[str]) -> publish.FoundCheckpoint:
    """Find the checkpoint that a run starts from while ``--load`` holds none, by Megatron-LM's rule."""
    where = f"--pretrained-checkpoint {args.pretrained_checkpoint}"
    found = _find_in(args, args.pretrained_checkpoint, where, args.ckpt_step)
    if args.load:
        notes.append(f"--load {args.load}: holds no checkpoint; starting from the weights of {where}")
    return found


def _find_in(args: Namespace, folder: str, where: str, step: int | None) -> publish.FoundCheckpoint:
    unpublished = args.verify_checkpoint == "off"
    found: publish.FoundCheckpoint | None = on_first_rank(
        where, lambda: checkpoint_source.find(folder, step, accept_unpublished=unpublished)
    )
    if found is None:
        raise CheckpointError(f"{where}: holds no checkpoint; check the path")
    return found
