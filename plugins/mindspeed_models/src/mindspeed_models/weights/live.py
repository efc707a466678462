"""A Hugging Face folder read straight into the model of a run, each rank its own share.

megatron-core's ``sharded_state_dict`` says which block of which global tensor a rank has, under any layout;
`TableReader` reads exactly that block.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)

from mindspeed_core.errors import DataError, SessionError
from mindspeed_core.run import LoadInfo
from mindspeed_megatron import model_state
from mindspeed_megatron.unwrap import unwrap
from mindspeed_megatron.vocabulary import settle_vocabulary
from mindspeed_models.config_file import read_config
from mindspeed_models.contradictions import contradictions, with_given
from mindspeed_models.families import described_model
from mindspeed_models.model_names import OVERRIDE
from mindspeed_models.recipe import ModelPlan, Recipe, RecipeError
from mindspeed_models.weights.hf_files import HfFiles, shown
from mindspeed_models.weights.reader import EMBEDDING, VOCABULARY, TableReader
from mindspeed_train.interface import on_all_ranks, on_first_rank

if TYPE_CHECKING:
    from mindspeed_core.run import Run

    class LibrarySession(Protocol):
        """A session that knows the run of a program's own loop."""

        @property
        def run(self) -> Run:
            """Return it."""


logger = logging.getLogger("mindspeed_core")
METADATA: Mapping[str, Any] = {"non_homogeneous_layers": True, "singleton_local_shards": False}
"""Layout of the described state: every layer has keys of its own."""
_AT_ONCE = 256 << 20
"""Bytes of loaded weights that a rank holds beside its model."""


def load_folder(run: Run, folder: str, flag: str) -> LoadInfo:
    """Load the weights of a folder into a run; nothing else of the run changes. Collective.

    Args:
        run: the run in progress, with its model and perhaps its optimizer.
        folder: holds ``config.json`` and weights.
        flag: what named it, for messages.

    Raises:
        CheckpointError: the folder holds another model, or a file is damaged; names it on every rank.
    """
    selection = model_state.select(run, METADATA, folder)
    return _fill_run(run, folder, flag, selection.chosen, run.args)


def load_pretrained(session: LibrarySession, folder: str | Path) -> None:
    """Load the weights of a folder in a library session, whose program has built its model. Collective.

    Call it after the model and the optimizer were built, before the first step.

    Raises:
        SessionError: the session knows of no model yet.
        CheckpointError: the folder holds another model, or a file is damaged; names it on every rank.
    """
    run = session.run
    if not run.model:
        raise SessionError("load_pretrained: the session knows no model yet; build it with the session first")
    chunks = zip(model_state.model_keys(run), run.model)
    state = {key: unwrap(chunk).sharded_state_dict(metadata=dict(METADATA)) for key, chunk in chunks}
    _fill_run(run, str(folder), "load_pretrained", state, _as_built(run))


def _fill_run(
    run: Run, folder: str, flag: str, state: Mapping[str, Mapping[str, Any]], args: Namespace
) -> LoadInfo:
    """Fill the described weights of all chunks, and whatever follows from them."""
    what, session = f"{flag} {folder}", run.session
    reader = on_all_ranks(what, lambda: open_reader(folder, args))
    with reader.files:
        on_first_rank(what, reader.check_repeats)

        def fill_chunks() -> dict[str, set[str]]:
            return {
                key: fill_chunk(unwrap(chunk), state.get(key, {}), reader, at_once=_at_once(run))
                for key, chunk in zip(model_state.model_keys(run), run.model)
            }

        names = on_all_ranks(what, fill_chunks)
    loaded = session.state(model_state.LoadedWeights)
    for key, filled in names.items():
        loaded.add(key, filled)
    if reader.left:
        logger.warning("mindspeed: %s, %s: not read: %s", what, OVERRIDE, shown(reader.left))
    saved, rows = reader.shape(EMBEDDING)[0], getattr(args, "padded_vocab_size", None)
    for note in settle_vocabulary(session, run.model, saved=saved, rows=rows, ids=None, where=what):
        logger.warning("mindspeed: %s", note)
    if run.optimizer is not None:
        # Mixed precision keeps its own copy of the parameters.
        run.optimizer.reload_model_params()
    return LoadInfo(path=Path(folder))


def _as_built(run: Run) -> Namespace:
    """Return the arguments with what a program gave to its model class, where no flag says it."""
    args = Namespace(**vars(run.args))
    for chunk in map(unwrap, run.model):
        args.position_embedding_type = getattr(chunk, "position_embedding_type", None)
        shared = getattr(chunk, "share_embeddings_and_output_weights", None)
        args.untie_embeddings_and_output_weights = None if shared is None else not shared
        args.padded_vocab_size = getattr(chunk, "vocab_size", None)
        args.rotary_base = base = getattr(chunk, "rotary_base", None)
        found = getattr(getattr(chunk, "rotary_pos_emb", None), "inv_freq", None)
        args.use_rope_scaling = None
        if found is not None and base is not None:
            steps = torch.arange(len(found), device=found.device) / len(found)
            args.use_rope_scaling = not torch.allclose(found.float(), float(base) ** -steps, rtol=1e-4)
    return args


def open_reader(folder: str | Path, args: Namespace) -> TableReader:
    """Open the files of a folder as the model that the arguments describe.

    Raises:
        RecipeError: flags and ``config.json`` are two models.
        DataError: files do not fit to ``config.json``.
    """
    recipe, own = plan_of_folder(folder, getattr(args, "model", None))
    plan = own
    differing = list(contradictions(own, args, built=True))
    if differing and not getattr(args, "override_model_config", False):
        raise RecipeError(
            f"{folder} holds another model than the one that is built: {'; '.join(map(str, differing))}; "
            "leave "
            f"the flags out, or give {OVERRIDE}"
        )
    if differing:
        plan = with_given(own, differing)
    files = HfFiles(folder, prefix=recipe.prefix)
    return TableReader(files, recipe, plan, own, added_tokens=getattr(args, "added_token_num", 0) or 0)


def plan_of_folder(folder: str | Path, model: str | None = None) -> tuple[Recipe, ModelPlan]:
    """Return family and plan of the model in a folder; ``model`` is ``--model``, if it is given."""
    return described_model(read_config(folder, "--load"), model, str(Path(folder) / "config.json"))


@torch.no_grad()
def fill_chunk(
    module: torch.nn.Module, state: Mapping[str, Any], reader: TableReader, *, at_once: int = _AT_ONCE
) -> set[str]:
    """Fill a chunk of a model.

    Args:
        module: the unwrapped chunk.
        state: its sharded state, or the part of it that is to be filled.
        reader: the files.
        at_once: bytes that are handed over together; 0 for all.

    Returns:
        The names of the weights that were filled.

    Raises:
        DataError: the chunk has a weight that no row of the table describes, or of another shape.
    """
    lacking = [each.key for entry in state.values() for each in _sharded(entry) if each.key not in reader]
    if lacking:
        raise DataError(
            f"{reader.files.folder}: the model has weights that files of the family {reader.plan.family} "
            "do not "
            f"describe: {shown(set(lacking))}; leave out the flag that adds them"
        )
    names: set[str] = set()
    for part in _parts(state, lambda each: fill(reader, each), at_once):
        found = module.load_state_dict(part, strict=False)
        if found.unexpected_keys:
            raise DataError(f"the model has no weights {shown(found.unexpected_keys)}")
        names.update(part)
    return names


def fill(reader: TableReader, shard: ShardedTensor) -> torch.Tensor:
    """Return the values of one shard, in its dtype.

    Raises:
        DataError: the files' tensor has another shape.
    """
    leading = shard.prepend_axis_num
    shape = (*(1 for _ in range(leading)), *shard.local_shape)
    known, wanted = reader.shape(shard.key), tuple(shard.global_shape)
    if known != wanted and not (_is_vocabulary(shard) and known[1:] == wanted[1:] and known[0] <= wanted[0]):
        remedy = (
            f"; give --padded-vocab-size {known[0]} or more, for which every row has a place"
            if _is_vocabulary(shard)
            else "; compare the model's flags with its config.json"
        )
        raise DataError(
            f"{reader.files.folder}: tensor {shard.key!r} has shape {list(known)} in the files and "
            f"{list(wanted)} in the model{remedy}"
        )
    found = reader.read(shard.key, shard.global_offset, shape)
    return found.reshape(shard.local_shape).to(shard.dtype)


def _is_vocabulary(shard: ShardedTensor) -> bool:
    return shard.key in VOCABULARY


def _parts(
    state: Mapping[str, Any], fill: Callable[[ShardedTensor], torch.Tensor], at_once: int
) -> Iterator[dict[str, Any]]:
    """Yield values for ``load_state_dict``, a limited number of bytes each time."""
    part: dict[str, Any] = {}
    size = 0
    for name, entry in state.items():
        if name.endswith("_extra_state"):
            continue
        part[name] = value = _value(entry, fill)
        size += value.numel() * value.itemsize if isinstance(value, torch.Tensor) else 0
        if at_once and size >= at_once:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _value(entry: Any, fill: Callable[[ShardedTensor], torch.Tensor]) -> Any:
    """Return the value of one entry of a sharded state: factories build their shards and merge them."""
    tree = {"value": entry}
    factories, _ = extract_matching_values(
        tree, lambda each: isinstance(each, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(tree)

    def of(each: Any) -> Any:
        if isinstance(each, ShardedTensor):
            return fill(each)
        if isinstance(each, ShardedObject):
            return each.data
        return each.obj if isinstance(each, LocalNonpersistentObject) else each

    return apply_factory_merges(dict_list_map_inplace(of, tree), factories)["value"]


def _sharded(entry: Any) -> Iterator[ShardedTensor]:
    tree = {"value": entry}
    apply_factories(tree)
    found: list[ShardedTensor] = []

    def look(each: Any) -> Any:
        if isinstance(each, ShardedTensor):
            found.append(each)
        return each

    dict_list_map_inplace(look, tree)
    return iter(found)


def _at_once(run: Run) -> int:
    """Return how many bytes are handed over together: all where modules are sharded themselves."""
    args = run.args
    sharded = getattr(args, "use_torch_fsdp2", False) or getattr(args, "use_megatron_fsdp", False)
    return 0 if sharded else _AT_ONCE
