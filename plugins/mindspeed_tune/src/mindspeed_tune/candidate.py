"""A candidate: values of flags that take the place of those of a training command."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_core.flags.flag_set import FlagSet
from mindspeed_tune.launch_command import LaunchCommand

TENSOR = "--tensor-model-parallel-size"
PIPELINE = "--pipeline-model-parallel-size"
CONTEXT = "--context-parallel-size"
EXPERT = "--expert-model-parallel-size"
EXPERT_TENSOR = "--expert-tensor-parallel-size"
SEQUENCE = "--sequence-parallel"
MICRO_BATCH = "--micro-batch-size"
GLOBAL_BATCH = "--global-batch-size"
LAYERS_PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
ZERO = "--use-distributed-optimizer"
GRADIENT_OVERLAP = "--overlap-grad-reduce"
PARAMETER_OVERLAP = "--overlap-param-gather"
RECOMPUTE = "--recompute-granularity"
RECOMPUTE_METHOD = "--recompute-method"
RECOMPUTE_LAYERS = "--recompute-num-layers"
_SHORT = {
    TENSOR: "tp",
    PIPELINE: "pp",
    CONTEXT: "cp",
    "--context-parallel-algo": "",
    "--ulysses-degree-in-cp": "ulysses",
    EXPERT: "ep",
    EXPERT_TENSOR: "etp",
    SEQUENCE: "sp",
    MICRO_BATCH: "b",
    LAYERS_PER_CHUNK: "chunks-of-",
    ZERO: "zero1",
    GRADIENT_OVERLAP: "overlap-grads",
    PARAMETER_OVERLAP: "overlap-params",
    RECOMPUTE: "recompute-",
}


@dataclass(frozen=True)
class Candidate:
    """Flags with their values.

    Attributes:
        settings: by flag: ``True`` for a switch that is given, ``False`` or None for a flag that is not,
            otherwise its value.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the settings on one line, the same for the same settings."""
        return " ".join(_words(self.settings)) or "the command as it is"

    @property
    def label(self) -> str:
        """Return the settings in the short form of reports: ``tp2 sp pp4 b1 zero1 recompute-full``.

        Sizes of 1 are left out, but that of a micro-batch; what has no short form is written as its flag.
        """
        found = []
        for flag, value in self.settings.items():
            if value is None or value is False or flag in (RECOMPUTE_METHOD, RECOMPUTE_LAYERS):
                continue
            short = _SHORT.get(flag)
            if short is None:
                found.append(flag.removeprefix("--") + ("" if value is True else f"={value}"))
            elif value is True:
                found.append(short)
            elif value != 1 or flag in (MICRO_BATCH, LAYERS_PER_CHUNK):
                found.append(f"{short}{value}")
        return " ".join(found) or "as it is"

    def with_settings(self, changed: Mapping[str, Any]) -> Candidate:
        """Return the candidate with some flags set otherwise."""
        return Candidate({**self.settings, **changed})

    def size(self, flag: str, default: int = 1) -> int:
        """Return a size that the candidate sets."""
        return int(self.settings.get(flag) or default)

    def arguments(self, given: Sequence[str], flags: FlagSet) -> tuple[str, ...]:
        """Return the arguments of a training command with these settings.

        Args:
            given: its arguments.
            flags: that exist, whose other spellings are replaced too.
        """
        return changed_arguments(given, self.settings, flags)

    def command(self, command: LaunchCommand, flags: FlagSet, **changes: Any) -> LaunchCommand:
        """Return a training command with these settings.

        Args:
            command: the user's.
            flags: that exist.
            changes: fields of the command that change too.
        """
        return replace(command, arguments=self.arguments(command.arguments, flags), **changes)


def changed_arguments(given: Sequence[str], settings: Mapping[str, Any], flags: FlagSet) -> tuple[str, ...]:
    """Return arguments with some flags set otherwise; those that are not named stay as they are."""
    replaced = {flags[flag].flag.dest for flag in settings if flag in flags}
    kept: list[str] = []
    for one in flags.given(given):
        dest = flags[one.option].flag.dest if one.option in flags else None
        if one.option in settings or dest in replaced:
            continue
        kept += [f"{one.option}={one.values[0]}"] if one.inline else [one.option, *map(str, one.values)]
    return (*kept, *_words(settings))


def _words(settings: Mapping[str, Any]) -> Iterable[str]:
    for flag, value in settings.items():
        if value is None or value is False:
            continue
        yield flag
        if value is not True:
            yield str(value)
