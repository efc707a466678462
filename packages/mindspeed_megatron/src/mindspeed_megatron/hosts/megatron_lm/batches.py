"""The script's names that turn samples into a batch, taken over while a session is open.

A script's ``get_batch`` gives a pipeline stage what Megatron-LM's own model needs there, and of every
sequence this rank's part in one layout. Features may need more fields on a stage, and whole sequences: both
are decided by functions that ``get_batch`` looks up among the script's names, where they are replaced.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_core.resolver.plan import PlanError, Problem
from mindspeed_megatron.chunk_places import place_of_chunk
from mindspeed_megatron.data_source import data_source
from mindspeed_megatron.hosts.megatron_lm import NAME
from mindspeed_megatron.hosts.megatron_lm.script_batch import FIELDS, NAMED, reads_samples, values_of

if TYPE_CHECKING:
    from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall

GET_BATCH, FETCH = "get_batch", "get_batch_on_this_tp_rank"
SPLIT, HAS_DATA = "get_batch_on_this_cp_rank", "is_first_or_last_pipeline_stage"
CONFIG = "core_transformer_config_from_args"
"""Names of the script: the micro-batch; a rank's samples; its part of them; whether a stage has any; the
model's configuration, made for every micro-batch."""

SLOT = "context-parallel"
"""Whoever fills it splits sequences, and gets them whole."""

PADDING = "padding_mask"
"""The field that a script does not know: it reaches the model beside the script."""


def take_over_batches(now: PretrainCall, forward_step: Any) -> None:
    """Replace names of the script of ``forward_step`` where a feature wants the batch, more or all of it.

    Raises:
        PlanError: an active feature cannot work with this script.
    """
    while isinstance(forward_step, functools.partial):
        forward_step = forward_step.func
    from mindspeed_megatron.hosts.megatron_lm.model import around_config_from_args, changes_config

    names: dict[str, Any] = getattr(inspect.unwrap(forward_step), "__globals__", {})
    more = _further_fields(now)
    _refuse(now, names, more)
    now.tells_padding = PADDING in more
    now.reads_any_length = _has_many_lengths(now) and FETCH in names
    named = reads_samples(names.get(FETCH))
    replaced: dict[str, Callable[..., Any]] = {}
    if (now.wants("get_batch", "compute_loss") or now.tells_padding) and GET_BATCH in names:
        replaced[GET_BATCH] = _get_batch(now, names[GET_BATCH], named=named)
        now.describes_beside = named
    if CONFIG in names and changes_config(now):
        replaced[CONFIG] = around_config_from_args(names[CONFIG])
    if splits_sequences(now) and SPLIT in names:
        replaced[SPLIT] = _whole(names[SPLIT])
    if more:
        replaced[HAS_DATA] = _has_data(now, names[HAS_DATA])
    if now.reads_any_length:
        replaced[FETCH] = (_spread_any_length if named else _fetch_any_length)(now, names[FETCH])
    elif more:
        replaced[FETCH] = (_spread if named else _fetch)(now, names[FETCH])
    for name, new in replaced.items():
        _replace(now, names, name, new)


def splits_sequences(now: PretrainCall) -> bool:
    """Return whether an active feature splits sequences, so that the script must not."""
    session = now.session
    return SLOT in session.plan.slots and session.args.context_parallel_size > 1


def _has_many_lengths(now: PretrainCall) -> bool:
    """Return whether a feature's micro-batches differ in length where the script's are of one length.

    Megatron-LM's tensor-parallel ranks receive them in tensors of ``--seq-length``.
    """
    args = now.session.args
    several = args.tensor_model_parallel_size > 1 and getattr(args, "variable_seq_lengths", False)
    return bool(several) and bool(data_source(now.session))


def _replace(now: PretrainCall, names: dict[str, Any], name: str, new: Callable[..., Any]) -> None:
    original = names[name]
    now.session.ledger.setting(
        f"{names.get('__name__', 'the script')}:{name}",
        lambda: names.__setitem__(name, new),
        lambda: names.__setitem__(name, original),
        owner=NAME,
        reason="the script looks it up among its own names",
    )


def _refuse(now: PretrainCall, names: Collection[str], more: Collection[str]) -> None:
    """Refuse features that this script gives no way to work."""
    reasons: dict[str, str] = {}
    if GET_BATCH not in names:
        reasons["get_batch"] = (
            f"the script's forward step calls no {GET_BATCH} of its own, so the batch cannot be changed"
        )
    absent = [name for name in (HAS_DATA, FETCH) if name not in names]
    unknown = sorted(set(more).difference(FIELDS, (PADDING,)))
    if unknown:
        reasons["batch_fields"] = f"batches of Megatron-LM's scripts have no {', '.join(unknown)}"
    elif more and absent:
        reasons["batch_fields"] = (
            "it needs further parts of a batch on pipeline stages, and the script has no "
            f"{' and '.join(absent)} to ask for them"
        )
    problems = [
        Problem("E-HOST", reason, "drop its flag for this script", feature=name)
        for stage, reason in reasons.items()
        for name in now.features_in(stage)
    ]
    if problems:
        raise PlanError(problems)


def _get_batch(now: PretrainCall, original: Callable[..., Any], *, named: bool) -> Callable[..., Any]:
    session = now.session

    @functools.wraps(original)
    def get_batch(data_iterator: Any, *rest: Any, **options: Any) -> Any:
        run = now.sync_run()
        with now.calling("get_batch", lambda iterator: original(iterator, *rest, **options)) as call:
            now.batch = session.call(
                "get_batch",
                run=run,
                data_iterator=data_iterator,
                vp_stage=run.context.vp_stage,
                microbatch=run.context.microbatch,
            )
        given = call.result if call.made else None
        return values_of(now.batch, given, now.described_by_script, named=named)

    return get_batch


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def whole(batch: Any, *rest: Any, **named: Any) -> Any:
        return batch

    return whole


def _has_data(now: PretrainCall, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def has_data(vp_stage: int | None = None, *rest: Any, **named: Any) -> Any:
        return original(vp_stage, *rest, **named) or bool(_added(now, vp_stage))

    return has_data


def _fetch(now: PretrainCall, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fetch(data_iterator: Any, *rest: Any, **named: Any) -> Any:
        read = None if data_iterator is None else _Read(data_iterator)
        batch: dict[str, Any] = original(read, *rest, **named)
        sample = batch
        if read is not None:
            sample = {**batch, PADDING: read.last.get(PADDING)}
        return _with_added(now, batch, sample)

    return fetch


def _spread(now: PretrainCall, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def spread(batch: dict[str, Any], *rest: Any, **named: Any) -> Any:
        # Megatron-LM empties the parts that its own model does not need on this stage.
        sample = dict(batch)
        return _with_added(now, original(batch, *rest, **named), sample)

    return spread


def _with_added(now: PretrainCall, batch: dict[str, Any], sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's batch with the fields that features need beside; ``sample`` is what was read here."""
    vp_stage = now.sync_run().context.vp_stage
    added = sorted(_added(now, vp_stage))
    if not added:
        return batch
    usual = _fields(now, *_ends(vp_stage))[1]
    # What is no field of a batch stays; of the others the script has filled those of this stage alone.
    kept = {name: None if name in FIELDS and name not in usual else value for name, value in batch.items()}
    found = kept | _on_every_rank(now, {name: sample.get(name) for name in added})
    now.padding_mask = found.pop(PADDING, None)
    return found


def _fetch_any_length(now: PretrainCall, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fetch(data_iterator: Any, *rest: Any, **named: Any) -> Any:
        found = _of_any_length(now, next(data_iterator) if now.sync_run().pg.tp.rank() == 0 else {})
        # In the order of the script, which passes them on by it.
        return {name: found.get(name) for name in FIELDS[:-1]}

    return fetch


def _spread_any_length(now: PretrainCall, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def spread(batch: dict[str, Any], *rest: Any, **named: Any) -> Any:
        return dict.fromkeys(NAMED) | _of_any_length(now, batch)

    return spread


def _of_any_length(now: PretrainCall, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a sample that this stage needs, on all tensor-parallel ranks."""
    vp_stage = now.sync_run().context.vp_stage
    wanted = _fields(now, *_ends(vp_stage))[1] | _added(now, vp_stage)
    found = _on_every_rank(now, {name: sample.get(name) for name in sorted(wanted)})
    now.padding_mask = found.pop(PADDING, None)
    return found


class _Read:
    """An iterator that remembers its last item."""

    def __init__(self, items: Any) -> None:
        self._items = items
        self.last: Mapping[str, Any] = {}

    def __iter__(self) -> _Read:
        return self

    def __next__(self) -> Any:
        self.last = next(self._items)
        return self.last


def _on_every_rank(now: PretrainCall, values: dict[str, Any]) -> dict[str, Any]:
    """Return the first tensor-parallel rank's values on all of them: it alone has read samples."""
    import torch
    from megatron.core.tensor_parallel import broadcast_data

    group = now.sync_run().pg.tp
    missing = [name for name, value in values.items() if value is None]
    if missing and group.rank() == 0:
        raise UserError(
            f"an active feature needs {', '.join(missing)} on every pipeline stage, and the samples of this "
            "script have none"
        )
    if group.size() == 1:
        return {name: value.to(now.run.dist.device) for name, value in values.items()}
    found: dict[str, Any] = {}
    for dtype, names in (
        (torch.int64, ("tokens", "labels", "position_ids")),
        (torch.float32, ("loss_mask",)),
        (torch.bool, ("attention_mask", PADDING)),
    ):
        wanted = [name for name in names if name in values]
        if wanted:
            found |= broadcast_data(wanted, values, dtype)
    return found


def _added(now: PretrainCall, vp_stage: int | None) -> frozenset[str]:
    """Return the fields that features need on a pipeline stage beside those that the script gives it."""
    run = now.sync_run()
    place = place_of_chunk(now.session, now.session.args, run.pg, vp_stage)
    asked = _fields(now, place.pre_process, place.post_process)[0]
    return asked - _fields(now, *_ends(vp_stage))[1]


def _ends(vp_stage: int | None) -> tuple[bool, bool]:
    """Return whether a chunk is the first or the last one for the script, wherever features place it."""
    from megatron.core import parallel_state

    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return parallel_state.is_pipeline_first_stage(**where), parallel_state.is_pipeline_last_stage(**where)


def _further_fields(now: PretrainCall) -> frozenset[str]:
    """Return the fields that pipeline stages need and the script does not give all of them."""
    if not now.wants("batch_fields", "place_chunks"):
        return frozenset()
    session = now.session
    size = session.args.pipeline_model_parallel_size
    further: set[str] = set()
    for rank in range(size):
        places = session.call("place_chunks", args=session.args, pp_rank=rank, pp_size=size)
        for chunk, place in enumerate(places):
            first, last = (rank, chunk) == (0, 0), (rank, chunk) == (size - 1, len(places) - 1)
            further |= _fields(now, place.pre_process, place.post_process)[0] - _fields(now, first, last)[1]
    return frozenset(further)


def _fields(now: PretrainCall, first: bool, last: bool) -> tuple[frozenset[str], frozenset[str]]:
    """Return the fields that features want on a pipeline stage, and those that the script gives."""
    session = now.session
    known = now.fields.get((first, last))
    if known is None:
        place = {"args": session.args, "pre_process": first, "post_process": last}
        known = session.call("batch_fields", **place), session.default("batch_fields", **place)
        now.fields[first, last] = known
    return known
