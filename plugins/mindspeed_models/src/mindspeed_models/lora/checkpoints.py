"""Checkpoints of adapters: adapters, what trains beside them, their optimizer, and the digest of the base.

The base comes from elsewhere, the adapters from a folder of their own:

- ``--load BASE --lora-load ADAPTERS``, as the seed has it, or
- ``--pretrained-checkpoint BASE --load ADAPTERS``, as a run that goes on in its own folder has it.

Without ``--lora-load``, ``--load`` is what its latest checkpoint says: adapters to go on with, or a base.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError, CheckpointError, UserError
from mindspeed_megatron.model_state import count_as_loaded
from mindspeed_models.lora.base_digest import base_digest
from mindspeed_models.lora.options import LOAD, NAME, SAVED, TARGETS, LoraOptions
from mindspeed_models.lora.peft_files import named
from mindspeed_models.lora.targets import OUTPUT, modules_of
from mindspeed_models.lora.trained import is_adapter, trained_names
from mindspeed_train.interface import publish, read_common

if TYPE_CHECKING:
    from mindspeed_core.run import LoadInfo, Run
    from mindspeed_core.session import Session

_BASE = "--pretrained-checkpoint"


@dataclass
class Places:
    """Folders that base and adapters of a session come from.

    Attributes:
        base: folder of the base; None where it is what the model is initialized with.
        peft: folder of a peft directory with the first adapters.
        digest: of the base, once it is known.
        ranks: of adapters whose rank is not ``--lora-r``, by role.
        given: the adapters of the peft directory, by key.
    """

    base: str | None = None
    peft: str | None = None
    digest: str = ""
    ranks: Mapping[str, int] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """The record of adapters in a checkpoint.

    Attributes:
        base: digest of the base.
        base_folder: where it came from; empty for the model's initial weights.
        ranks: of adapters whose rank is not ``--lora-r``, by role.
    """

    base: str
    base_folder: str
    ranks: Mapping[str, int]


def separate(session: Session, args: Namespace) -> Namespace:
    """Return arguments whose ``--load`` names adapters alone, and remember where the base is.

    Raises:
        ArgumentError: flags name two bases, or two folders of adapters.
    """
    places = session.state(Places)
    load, pretrained = getattr(args, "load", None), getattr(args, "pretrained_checkpoint", None)
    adapters = args.lora_load
    if adapters and pretrained and load:
        raise ArgumentError(
            LOAD,
            adapters,
            f"the base is that of {_BASE} {pretrained}, and --load {load} would be a second folder of "
            "adapters",
            "drop one of the two",
        )
    if adapters:
        base = pretrained or load
    elif load and read_record(load) is not None:
        adapters, base = load, pretrained
    elif load and pretrained:
        # A folder to go on in, which is empty still.
        adapters, base = load, pretrained
    else:
        adapters, base = None, pretrained or load
    peft = named(adapters, args.lora_adapter_name) if adapters else None
    if adapters and peft is None and args.lora_load and read_record(adapters) is None:
        raise ArgumentError(
            LOAD,
            adapters,
            "it holds neither a checkpoint of adapters nor a peft directory (adapter_config.json)",
            "name the --save folder of a run with adapters; a base is named by --load",
        )
    values: dict[str, Any] = {**vars(args), "load": None if peft else adapters}
    step = getattr(args, "ckpt_step", None)
    if step is not None and base and values["load"] is None:
        base, values["ckpt_step"] = _step_of(session, base, step), None
    places.base, places.peft = base, peft
    if peft:
        values |= _from_peft(session, args, Path(peft), places)
    elif adapters and (record := read_record(adapters)) is not None:
        places.ranks = record.ranks
    if hasattr(args, "pretrained_checkpoint"):
        values["pretrained_checkpoint"] = None
    return Namespace(**values)


def _step_of(session: Session, base: str, step: int) -> str:
    """Return the folder of one step of a base.

    Raises:
        ArgumentError: it has none, or the host takes the latest alone.
    """
    single = Path(base) / f"iter_{step:07d}"
    if session.host.name != "standalone" or not single.is_dir():
        raise ArgumentError(
            "--ckpt-step",
            step,
            f"the base {base} is loaded from the latest checkpoint of its folder, and has no other here",
            "drop the flag, or name a folder whose latest checkpoint it is",
        )
    return str(single)


def read_record(folder: str) -> Record | None:
    """Return the record of the latest checkpoint in a folder; None where it holds no adapters.

    Raises:
        CheckpointError: a checkpoint is there and cannot be read.
    """
    if "://" in folder or not Path(folder).is_dir():
        return None
    found = publish.find(Path(folder), None, accept_unpublished=True)
    if found is None or not (found.path / "common.pt").is_file():
        return None
    # Classes of other programs are taken as records without behaviour: nothing of them is used here.
    state = (read_common(found.path, trusted=True).get("features") or {}).get(NAME)
    return None if state is None else record_of(state, str(found.path))


def record_of(state: Any, where: str) -> Record:
    """Return the record that `state_of` made.

    Raises:
        CheckpointError: it is damaged.
    """
    given: dict[str, Any] = state if isinstance(state, dict) else {}
    base, folder, ranks = given.get("base"), given.get("base_folder"), given.get("ranks")
    sound = isinstance(ranks, dict) and all(isinstance(rank, int) and rank > 0 for rank in ranks.values())
    if isinstance(base, str) and isinstance(folder, str) and isinstance(ranks, dict) and sound:
        return Record(base, folder, dict(ranks))
    raise CheckpointError(f"{where}: the record of its adapters is damaged; load another checkpoint")


def state_of(run: Run, options: LoraOptions) -> dict[str, Any]:
    """Return what a checkpoint holds of the feature; collective at the first call."""
    places = run.session.state(Places)
    if not places.digest:
        places.digest = base_digest(run)
    return {"base": places.digest, "base_folder": places.base or "", "ranks": dict(options.ranks)}


def check_finetuned(run: Run) -> None:
    """Refuse adapters of another base where only their weights are taken, and no state of features.

    Raises:
        CheckpointError: names both digests and the way out.
    """
    args = run.args
    if getattr(args, "finetune", False) and args.load and (record := read_record(args.load)) is not None:
        check_base(run, vars(record))


def check_base(run: Run, state: Any) -> None:
    """Refuse adapters that were trained beside another base.

    Raises:
        CheckpointError: names both digests and the way out.
    """
    record = record_of(state, f"--load {run.args.load}")
    places = run.session.state(Places)
    if not places.digest:
        places.digest = base_digest(run)
    if record.base == places.digest:
        return
    beside = (
        f"{record.base_folder} ({record.base})" if record.base_folder else f"initial weights ({record.base})"
    )
    now = f"{places.base} ({places.digest})" if places.base else f"initial weights ({places.digest})"
    raise CheckpointError(
        f"{run.args.load}: its adapters were trained beside {beside}, this run has {now}; name that base "
        f"with {_BASE}, or merge the adapters into it (mindspeed-models merge-lora)"
    )


def choose_weights(
    run: Run, state: dict[str, dict[str, Any]], source: str | None
) -> dict[str, dict[str, Any]]:
    """Return the part of a description that a checkpoint of adapters holds, or that a base does.

    Args:
        run: the run.
        state: of every chunk by its key.
        source: the folder of a base; None for the run's own checkpoints.
    """
    found: dict[str, dict[str, Any]] = {}
    for (key, part), chunk in zip(state.items(), run.model):
        trained = trained_names(chunk)
        found[key] = {
            name: entry
            for name, entry in part.items()
            if (name in trained if source is None else not is_adapter(name))
        }
    return found


def load_base(run: Run) -> LoadInfo | None:
    """Load the base, where one is named; otherwise the model keeps its initial weights. Collective."""
    session = run.session
    places = session.state(Places)
    places.digest = ""
    if places.base:
        info: LoadInfo = session.call("load_checkpoint", run=run, source=places.base)
        return info
    trained = [trained_names(chunk) for chunk in run.model]
    names = frozenset().union(*trained)
    count_as_loaded(run, lambda name: not is_adapter(name) and name not in names)
    return None


def refuse_in_library(session: Session, args: Namespace) -> None:
    """Refuse flags of checkpoints where the loop is the caller's.

    Raises:
        UserError: says which function loads adapters.
    """
    if session.host.name == "library" and args.lora_load:
        raise UserError(
            f"{LOAD} {args.lora_load}: checkpoints of a library session are the caller's; pass the "
            "adapters, which are weights of the model (lora_A, lora_B), to dist_checkpointing yourself"
        )


def options_of(session: Session, args: Namespace) -> LoraOptions:
    """Return the options of a session's adapters, with the ranks of those that are loaded."""
    return replace(LoraOptions.of(args), ranks=session.state(Places).ranks)


def fill_from_peft(run: Run) -> None:
    """Give the adapters the values of a peft directory, where one is named."""
    places = run.session.state(Places)
    if not places.peft or run.session.platform.dry_run:
        return
    from mindspeed_models.lora.live import fill_adapters

    fill_adapters(run, places.given, f"{LOAD} {places.peft}")
    trained = [trained_names(chunk) for chunk in run.model]
    names = frozenset().union(*trained)
    count_as_loaded(run, lambda name: name in names)


def _from_peft(session: Session, args: Namespace, folder: Path, places: Places) -> dict[str, Any]:
    """Read a peft directory; return the arguments that it decides.

    Raises:
        ArgumentError: flags that are given say something else.
        UserError: nothing says of which model it is.
    """
    from mindspeed_models.features.model_recipes import described
    from mindspeed_models.lora.adapter_files import read_peft, state_for

    found = described(args)
    if found is None:
        raise UserError(
            f"{LOAD} {folder}: is a peft directory, whose names are Hugging Face's; say with "
            "--model-config which model "
            "it belongs to"
        )
    recipe, plan = found
    adapters, config = read_peft(folder, recipe.entries(plan), plan)
    decided = {"lora_r": adapters.rank, "lora_alpha": adapters.alpha}
    for name, value in decided.items():
        given = getattr(args, name)
        flag = f"--{name.replace('_', '-')}"
        if session.provenance.get(name, "default") != "default" and given != value:
            raise ArgumentError(
                flag,
                given,
                f"the peft directory {folder} has {value:g} (r {config.rank})",
                f"give {flag} {value:g}",
            )
    there = {key.rpartition(".")[2].removeprefix("linear_") for key in adapters.pairs}
    wanted = set(LoraOptions.of(args).roles)
    if there != wanted:
        raise ArgumentError(
            TARGETS,
            " ".join(args.lora_target_modules),
            f"the peft directory {folder} has adapters of {' '.join(sorted(there))}",
            f"name these: {' '.join(_named(role) for role in sorted(there))}",
        )
    saved = set(modules_of(args.lora_modules_to_save or ()))
    apart = [key for key in adapters.whole if saved.isdisjoint(key.split("."))]
    if apart:
        raise ArgumentError(
            SAVED,
            " ".join(args.lora_modules_to_save or ()) or None,
            f"the peft directory {folder} holds {apart[0]} whole, which would be left out",
            f"name its module: {SAVED} {apart[0].split('.')[-2]}",
        )
    ranks: dict[str, int] = {}
    for key, pair in adapters.pairs.items():
        role, rank = key.rpartition(".")[2].removeprefix("linear_"), pair.a.shape[0]
        if ranks.setdefault(role, rank) != rank:
            raise UserError(f"{LOAD} {folder}: adapters of {role} have several ranks; merge them instead")
    places.ranks = {role: rank for role, rank in ranks.items() if rank != adapters.rank}
    places.given = {**state_for(adapters.pairs), **adapters.whole}
    return decided


def _named(role: str) -> str:
    return role if role == OUTPUT else f"linear_{role}"
