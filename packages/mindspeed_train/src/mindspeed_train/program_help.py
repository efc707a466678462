"""``mindspeed-train --help``: flags by family on one screen, one family, or one flag with all that is known.

Imports neither torch nor megatron-core.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from mindspeed_core.discovery.extensions import BROUGHT_BY
from mindspeed_core.errors import UsageError
from mindspeed_core.flags.core import CORE_OWNER
from mindspeed_core.flags.help import placeholder
from mindspeed_core.flags.values import arity, kind_of_flag
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.listing import Cell, print_heading, print_hint, print_labelled, print_rows, say
from mindspeed_train.flag_help import help_text

if TYPE_CHECKING:
    from mindspeed_core.flags.entries import FlagEntry
    from mindspeed_core.flags.flag_set import FlagSet
    from mindspeed_core.registry import Registry

HELP = ("--help", "-h")
HELP_FLAG = "--help-flag"
ALL = "all"
_LABEL = 10

USAGE = (
    ("mindspeed-train FLAGS", "train (also under torchrun, srun)"),
    ("mindspeed-train --nproc N FLAGS", "train with N processes"),
    ("mindspeed-train COMMAND ...", "run a command (--help explains it)"),
    ("mindspeed-train --nproc N COMMAND ...", "run it in N processes, if made for it"),
)


FIRST_STEPS = (
    ("mindspeed-train FLAGS", "train (also under torchrun, srun)"),
    ("mindspeed-train --nproc N FLAGS", "train in N processes"),
    ("mindspeed-train FLAGS --plan-only", "say what would be switched on"),
    ("mindspeed-train --help", "families of flags, commands"),
    ("mindspeed-train --help FAMILY", "the flags of one family"),
    ("mindspeed-train --help-flag FLAG", "one flag and all about it"),
)


def requested_topic(arguments: Sequence[str]) -> tuple[str, str] | None:
    """Return which help a command line asks for: ``--help`` with a family, ``--help-flag`` with a flag.

    The second is empty where nothing is named. None where no help is wanted.
    """
    for number, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        behind = arguments[number + 1] if number + 1 < len(arguments) else ""
        if name == HELP_FLAG:
            return HELP_FLAG, value if equals else behind
        if name in HELP:
            return HELP[0], value if equals else "" if behind.startswith("-") else behind
    return None


def print_first_steps() -> None:
    """Print what to type first, on ten lines."""
    print_heading("mindspeed-train trains a model from flags, which have Megatron-LM's names")
    emit()
    print_rows([(Cell(line, "name"), text) for line, text in FIRST_STEPS], indent=2, tabs=False)
    emit()
    print_hint("mindspeed-features list: what is installed; doctor: whether this machine is fit")


def print_help(flags: FlagSet, commands: Mapping[str, str]) -> None:
    """Print how the program is used, its commands, and the families of flags.

    Args:
        flags: of everything that is installed.
        commands: what each sub-command does.
    """
    print_heading("usage")
    print_rows([(Cell(line, "name"), text) for line, text in USAGE], indent=2, tabs=False)
    emit()
    print_heading("commands")
    print_rows([(Cell(name, "name"), text) for name, text in commands.items()], indent=2, tabs=False)
    emit()
    families = flag_families(flags.entries)
    print_heading("flags by family", f"{len(flags.entries)} in all, with Megatron-LM's names")
    print_rows(
        [
            (
                Cell(family, "name"),
                Cell(f"{len(members):>3}", "dim"),
                " ".join(e.flag.name for e in members[:6]),
            )
            for family, members in families.items()
        ],
        indent=2,
        tabs=False,
    )
    emit()
    print_hint(
        "--help FAMILY lists the flags of one family or feature, --help all every flag, --help-flag FLAG "
        "explains one. mindspeed-features plan -- FLAGS shows what flags switch on. --traceback, anywhere, "
        "prints tracebacks of errors too."
    )


def print_family(flags: FlagSet, name: str) -> None:
    """Print the whole help of the flags of a family, a feature, or of every family with the word.

    Raises:
        UsageError: there is no such family.
    """
    if name == ALL:
        emit(help_text(flags.entries, "mindspeed-train").rstrip())
        return
    families = flag_families(flags.entries)
    wanted = family_name(name)
    of_feature = [e for e in flags.entries if name in (e.owner, *(a.owner for a in e.adoptions))]
    if wanted in families:
        found = families[wanted]
    elif of_feature:
        found = of_feature
    else:
        words = [family for family in families if wanted and wanted in family]
        found = [entry for family in words for entry in families[family]]
    if not found:
        close = get_close_matches(wanted, [*families, *flags_of_features(flags)], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(families)}"
        raise UsageError(f"--help {name}: no family or feature of that name has flags; {hint}")
    emit(help_text(found, "mindspeed-train").rstrip())


def print_flag(flags: FlagSet, registry: Registry, name: str) -> None:
    """Print everything that is known about one flag: values, default, source, readers, since when.

    Args:
        flags: of everything that is installed.
        registry: what is installed.
        name: an option string, with or without dashes.

    Raises:
        UsageError: no installed package has the flag; says who does, or what may have been meant.
    """
    if not name.strip("-"):
        raise UsageError(f"{HELP_FLAG}: name a flag, for instance {HELP_FLAG} --num-layers")
    option = name if name.startswith("--") else f"--{name.lstrip('-')}"
    if option not in flags:
        option = next((o for o in (option.replace("_", "-"), option.replace("-", "_")) if o in flags), option)
    if option not in flags:
        problem = flags.unknown(option)
        raise UsageError(f"{option}: {problem.reason}; {problem.remedy}")
    entry = flags[option]
    flag = entry.flag
    print_heading(flag.name if flag.is_switch else f"{flag.name} {placeholder(flag)}")
    say(flag.help or "(its owner says nothing about it)")
    emit()
    for label, text in _facts(entry, registry):
        print_labelled(label, text, wide=_LABEL)
    emit()
    print_hint(f"mindspeed-train --help {family_name(entry.heading)} lists the flags beside it.")


def flag_families(entries: Iterable[FlagEntry]) -> dict[str, list[FlagEntry]]:
    """Return flags by the name of their family, in the order in which ``--help`` lists them."""
    families: dict[str, list[FlagEntry]] = {}
    for entry in entries:
        families.setdefault(family_name(entry.heading), []).append(entry)
    return families


def family_name(heading: str) -> str:
    """Return what one types for a heading: ``moe`` for ``mindspeed-moe 0.1.0: moe``, lower case, dashes."""
    if heading == CORE_OWNER:
        return "core"
    # The heading of a feature's family carries distribution and version.
    bare = re.sub(r"^\S+ \d\S*: ", "", heading)
    return "-".join(re.findall(r"[a-z0-9]+", bare.lower()))


def flags_of_features(flags: FlagSet) -> dict[str, list[FlagEntry]]:
    """Return the flags that each feature declares or adopts."""
    found: dict[str, list[FlagEntry]] = {}
    names = {record.cls.name for record in flags.features}
    for entry in flags.entries:
        for owner in (entry.owner, *(adoption.owner for adoption in entry.adoptions)):
            if owner in names:
                found.setdefault(owner, []).append(entry)
    return found


def _facts(entry: FlagEntry, registry: Registry) -> Iterable[tuple[str, str]]:
    flag = entry.flag
    others = flag.options[1:]
    if others:
        yield "also", ", ".join(others)
    values = ", ".join(map(str, flag.choices))
    yield (
        "value",
        values or (kind_of_flag(flag) if flag.is_switch else f"{kind_of_flag(flag)}, {arity(flag)}"),
    )
    yield "default", _default(entry)
    yield "source", _source(entry, registry)
    yield "read by", _readers(entry, registry)
    yield "since", _since(entry, registry)
    yield "argument", f"args.{flag.dest}{' = False' if flag.inverts else ''}"
    if flag.per_rank:
        yield "ranks", "may differ between ranks; every other flag must agree"
    if flag.changes_training:
        yield "training", "decides what is trained: refused where nothing reads it"


def _default(entry: FlagEntry) -> str:
    flag = entry.flag
    if flag.is_switch:
        return "off"
    several = isinstance(flag.default, (list, tuple))
    own = (
        "none"
        if flag.default in (None, "")
        else " ".join(map(str, flag.default))
        if several
        else flag.default
    )
    changed = [
        f"{adoption.flag.default} with {adoption.owner}"
        for adoption in entry.adoptions
        if adoption.flag.default not in (None, flag.default)
    ]
    return "; ".join([str(own), *changed])


def _source(entry: FlagEntry, registry: Registry) -> str:
    """Return who defines the flag, and whose name and meaning it has."""
    from mindspeed_megatron.upstream.megatron_lm_flags import megatron_lm_flags

    if entry.owner in registry.features:
        record = registry.features[entry.owner]
        owner = f"feature {entry.owner} of {record.dist}"
    else:
        owner = entry.owner
    version, theirs = megatron_lm_flags()
    upstream = next((f for f in theirs if set(entry.flag.options) & {*f["options"]}), None)
    if upstream is None:
        return owner
    default = upstream.get("default")
    differs = not entry.flag.is_switch and default is not None and default != entry.flag.default
    return f"{owner}; a flag of Megatron-LM {version}{f', whose default is {default}' if differs else ''}"


def _readers(entry: FlagEntry, registry: Registry) -> str:
    """Return the features and the field of megatron-core that get the value."""
    from mindspeed_megatron.config_fields import config_fields
    from mindspeed_megatron.config_flags import dest_of

    of_features = dict.fromkeys((entry.owner, *(adoption.owner for adoption in entry.adoptions)))
    names = [name for name in of_features if name in registry.features]
    readers = [f"feature {name}" for name in names]
    if entry.owner not in registry.features:
        fields = [f"{f.owner}.{f.name}" for f in config_fields() if dest_of(f.name) == entry.flag.dest]
        configured = f" (megatron-core's {', '.join(fields)})" if fields else ""
        readers.insert(0, f"{'the core' if entry.owner == CORE_OWNER else entry.owner}{configured}")
    return "; ".join(readers)


def _since(entry: FlagEntry, registry: Registry) -> str:
    if entry.owner in registry.features:
        dist = registry.features[entry.owner].dist
    else:
        dist = BROUGHT_BY.get(entry.owner.removeprefix("host "), CORE_OWNER)
    return f"{dist} {entry.flag.since}" if entry.flag.since else f"the first release of {dist}"
