"""The declarations of a plugin: features, flags, patches, and from two further modules conditions and proofs.

A feature is a class: its attributes are data (flags, requirements, conflicts, slots, patches, proof), its
methods are hook implementations. All of it is plain Python and the standard library, because
declarations of every installed plugin are loaded whenever somebody lists or plans features: importing a
declaration must load neither torch nor megatron (nor numpy, nor pluggy).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from mindspeed_core.conditions import Conflict, Fallback, Requirement, TakeOver
from mindspeed_core.conditions import Slot as Slot
from mindspeed_core.errors import DeclarationError
from mindspeed_core.hooks.marker import PROJECT as PROJECT
from mindspeed_core.hooks.marker import hookimpl as hookimpl
from mindspeed_core.scenario import LOADED as LOADED
from mindspeed_core.scenario import QUANTITIES as QUANTITIES
from mindspeed_core.scenario import Gain as Gain
from mindspeed_core.scenario import Proofs as Proofs
from mindspeed_core.scenario import Resume as Resume
from mindspeed_core.scenario import Scenario

_OPTION = re.compile(r"--[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def dest_of(option: str) -> str:
    """Return the attribute of parsed arguments that an option string sets, where nothing else is declared."""
    return option.lstrip("-").replace("-", "_").replace(".", "_")


@dataclass(frozen=True)
class Flag:
    """A command-line flag, spelled exactly as users type it.

    ``type=bool`` makes a switch without a value. A flag that the host already defines is adopted: its
    choices are extended by ``choices``, a changed ``default`` applies only where the user gave no value.

    Attributes:
        name: the option string, for instance ``--use-flash-attn``.
        type: ``bool``, ``int``, ``float`` or ``str``, or a torch-free callable from text to value.
        default: the value where the flag is not given; ``False`` for switches.
        choices: the legal values, empty for no restriction.
        choices_from: name of an extension point: what packages contribute to it are legal values too.
        help: one sentence for ``--help``.
        nargs: argparse's ``nargs``; with it the value is a list.
        aliases: other spellings of the same flag.
        dest: attribute of the parsed arguments; by default the name without dashes.
        inverts: the flag is a switch that turns *off* this attribute (``--no-x`` with ``inverts="x"``).
        metavar: the placeholder in ``--help``.
        per_rank: the value may differ between ranks (paths on a node); others must agree.
        allow_nonfinite: accept ``nan`` and ``inf`` for a float flag.
        group: heading in ``--help``; features leave it empty and get the heading of their family.
        changes_training: the value decides what is trained (a mask, a loss, which tokens an expert drops),
            not only how. Given where nothing reads it, such a flag is refused; any other one is noted.
        since: the version of its distribution that brought it; empty for the first release.
    """

    name: str
    type: Callable[[str], Any] = bool
    default: Any = None
    choices: tuple[Any, ...] = ()
    help: str = ""
    nargs: str | int | None = None
    aliases: tuple[str, ...] = ()
    dest: str = ""
    inverts: str = ""
    metavar: str | None = None
    per_rank: bool = False
    allow_nonfinite: bool = False
    group: str = ""
    choices_from: str = ""
    changes_training: bool = False
    since: str = ""

    def __post_init__(self) -> None:
        for option in (self.name, *self.aliases):
            if not isinstance(option, str) or not _OPTION.match(option):
                raise DeclarationError(f"flag {option!r}: an option string looks like --some-name")
        if not callable(self.type):
            raise DeclarationError(f"flag {self.name}: type {self.type!r} is not callable")
        if self.inverts and self.type is not bool:
            raise DeclarationError(f"flag {self.name}: only a switch (type=bool) can invert {self.inverts!r}")
        if not self.dest:
            dest = self.inverts or dest_of(self.name)
            object.__setattr__(self, "dest", dest)
        if self.is_switch and self.default is None:
            object.__setattr__(self, "default", bool(self.inverts))
        object.__setattr__(self, "choices", tuple(self.choices))
        object.__setattr__(self, "aliases", tuple(self.aliases))

    @property
    def is_switch(self) -> bool:
        """True where the flag takes no value."""
        return self.type is bool and self.nargs is None

    @property
    def options(self) -> tuple[str, ...]:
        """Option string and aliases."""
        return (self.name, *self.aliases)

    def meaning(self) -> tuple[Any, ...]:
        """Return what declarations of one flag must share: destination, kind of value, arity, inversion."""
        kind = self.type if self.type in (bool, int, float, str) else getattr(self.type, "__qualname__", "?")
        return (self.dest, kind, self.nargs, self.inverts)


@dataclass(frozen=True)
class Patch:
    """Change of a symbol of megatron-core or torch: the last resort.

    Attributes:
        target: ``"package.module:Qual.name"``.
        new: ``replace``: the new object; ``wrap``: a callable from the current object to the new one. Either
            may be given lazily as ``"module:attribute"``, which keeps the declaration free of imports.
        reason: why no other way exists; ``mindspeed-features patches`` prints it.
        kind: ``"replace"`` (at most one feature per target), ``"wrap"`` (stacks in plan order) or ``"add"``:
            a name that the module or class lacks; left alone where it exists.
        versions: a PEP 508 requirement the patch was written for, ``"megatron-core>=0.15,<0.17"``.
        required: a missing target is an error; ``False`` skips the patch where the symbol does not exist.
        also: further holders of the object (default arguments, registries), as ``"module:attribute"``.
        every_name: replace the object under every name in modules, though the target only imported it.
        owner: filled in by the core: the feature, host or platform that asks for it.
    """

    target: str
    new: Any
    reason: str
    kind: str = "replace"
    versions: str = ""
    required: bool = True
    also: tuple[str, ...] = ()
    owner: str = ""
    every_name: bool = False

    def __post_init__(self) -> None:
        module, _, name = self.target.partition(":")
        if not module or not name:
            raise DeclarationError(f"patch target {self.target!r}: write 'package.module:Qual.name'")
        if self.kind not in ("replace", "wrap", "add"):
            raise DeclarationError(
                f"patch {self.target}: kind {self.kind!r} is none of 'replace', 'wrap', 'add'"
            )
        if not self.reason:
            raise DeclarationError(f"patch {self.target}: a patch states its reason")
        object.__setattr__(self, "also", tuple(self.also))


@dataclass(frozen=True)
class ExtensionPoint:
    """Entry-point group through which other packages extend a plugin.

    The core reads it like its own groups: lazily, listed, and a broken package hurts no other.

    Attributes:
        name: how code asks for it, ``registry.extensions("cp.planners")``.
        group: the entry-point group, ``"mindspeed_cp.planners"``.
        summary: one line for the listing.
        check: ``"module:function"`` called with each loaded object; raises ``DeclarationError`` to refuse it.
    """

    name: str
    group: str
    summary: str = ""
    check: str = ""


@dataclass(frozen=True)
class StageSpecs:
    """Hook specifications that a plugin publishes: further stages, in a module of its own.

    Attributes:
        module: import path of the module with the ``@hookspec`` functions; imported when a session opens.
        stages: the names it defines, so that declarations can be checked without importing it.
        summary: one line for the listing.
        collecting: those of the stages that collect every implementation's result (``firstresult=False``).
    """

    module: str
    stages: tuple[str, ...]
    summary: str = ""
    collecting: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "collecting", tuple(self.collecting))


@dataclass(frozen=True)
class HookApi:
    """Version of the hook interface that a plugin was written for, among its declarations.

    A core that is too old for the plugin then says so in one sentence. Without it the version is derived
    from the stages and arguments that the plugin's features use.

    Attributes:
        version: ``"MAJOR.MINOR"``, the ``mindspeed_core.hooks.API_VERSION`` of the core it is tested with.
    """

    version: str


class Feature:
    """Base of every feature: data as class attributes, hook implementations as methods.

    A session instantiates each active feature once, without arguments. Attributes that are not listed here
    (and do not begin with an underscore) are refused, so that a misspelled fact never goes unnoticed.
    """

    name: ClassVar[str] = ""
    """Kebab-case identifier, unique over all installed packages."""
    family: ClassVar[str] = ""
    """Heading under which it is listed."""
    summary: ClassVar[str] = ""
    """One line."""
    stability: ClassVar[str] = "stable"
    level: ClassVar[int] = 2
    """The optimization level that includes it: 0, 1 or 2."""
    flags: ClassVar[Sequence[Flag]] = ()
    requires: ClassVar[Sequence[Requirement]] = ()
    conflicts: ClassVar[Sequence[Conflict]] = ()
    after: ClassVar[Sequence[str]] = ()
    """Features that come earlier in the plan when both are active; earlier means the outer wrapper."""
    before: ClassVar[Sequence[str]] = ()
    """Features that come later in the plan when both are active, also those it requires: it wraps around
    them and sees their results, for instance the modules that they placed."""
    slots: ClassVar[Sequence[str]] = ()
    replaces_roles: ClassVar[Sequence[str]] = ()
    """Roles whose modules it replaces without filling a slot they belong to: ``("final_layernorm",)``."""
    packages: ClassVar[Sequence[str]] = ()
    """PEP 508 requirements; the marker may test ``platform``: ``"torch_npu>=2.6; platform == 'npu'"``."""
    platforms: ClassVar[Sequence[str]] = ("cpu", "cuda", "npu")
    hosts: ClassVar[Sequence[str]] = ()
    """Hosts whose training loops it works in; empty means all of them."""
    fallback: ClassVar[Fallback | None] = None
    takes_over: ClassVar[Sequence[TakeOver]] = ()
    """Features whose part this one does where both are asked for."""
    patches: ClassVar[Sequence[Patch]] = ()
    verify: ClassVar[Sequence[Scenario]] = ()
    """Its proofs, or `Proofs` that name the module in which they stand."""
    docs: ClassVar[str] = ""
    """``"package:relative/path.md"``: the feature's documentation page inside its package."""
    modes: ClassVar[Sequence[str]] = ("train", "inference")
    """Modes of sessions in which it has a part. Attention names ``inference`` only where it computes with a
    cache of keys."""
    mode_fallback: ClassVar[Fallback | None] = None
    """What computes in a mode that is not among ``modes``, and why; None: the feature has no effect there."""
    trains_nothing: ClassVar[str] = ""
    """Why it carries no proof: one sentence that says what it does in the place of a training. Such a feature
    implements ``prepare_process`` alone, and ends the program there."""
    places_modules: ClassVar[bool] = False
    """The feature replaces modules or changes built instances: matching none of them is an error."""
    needs_open_session: ClassVar[bool] = False
    """Its modules work only while the session is open: they call patched symbols or changed instances."""

    fake_tensors: ClassVar[bool | None] = None
    """Fact: works on fake tensors (dry run)."""
    deterministic: ClassVar[bool | None] = None
    """Fact: two runs give the same bits."""
    affects_checkpoint: ClassVar[bool | None] = None
    """Fact: a checkpoint written with it cannot be read without it."""
    checkpoint_as: ClassVar[str] = ""
    """Fact: the feature whose checkpoints are those of this one, which computes the same in another way; each
    reads the other's."""
    formulas: ClassVar[Mapping[str, str]] = {}
    """Fact: closed formulas (``flop``, ``bytes_sent``, ``activation_bytes``) over argument names, of one
    layer, rank and micro-batch; ``activation_bytes.npu`` is that of a platform whose kernel keeps
    something else."""
    tuning: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Fact: flags worth searching, with the values to try."""

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether the arguments request the feature; by default: its first flag is set."""
        if not cls.flags:
            return False
        first = cls.flags[0]
        value = getattr(args, first.dest, first.default)
        # The host's own choices of a flag that a feature extends do not ask for the feature.
        if first.choices and first.nargs is None and value not in first.choices:
            return False
        return (
            bool(value) != bool(first.default) if first.is_switch else bool(value) and value != first.default
        )

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return why a requested feature has nothing to do with these arguments; empty where it has.

        It is held back then, and the reason is printed with the plan.
        """
        return ""

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Return values of other arguments that this feature's flags stand for, ``{dest: value}``.

        Called for every installed feature before validation; an argument given by the user wins.
        """
        return {}

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Check the arguments of a requested feature; return problems, one sentence each."""
        return ()

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return flags of the active feature that have no effect beside these arguments, with reasons.

        A flag is read by the features that declare it, while they are active; this names the exceptions:
        ``{"--acme-decay": "--acme-kind last keeps no average; set --acme-kind mean"}``. Only flags that
        somebody gives, with another value than their default, are reported.
        """
        return {}

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return what a user of the active feature should know about these arguments, one sentence each.

        Printed with the plan and when a run starts; no part of the plan's digest.
        """
        return ()

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """Return what the active feature changes in the function that the model computes, by name.

        Checkpoints hold it, and weights of a model with other facts are refused: a scale of the embedding, a
        limit of attention scores, another router. A name of megatron-core's configuration (``window_size``)
        gives that field its value. Leave out what is off, and what only trains otherwise or
        computes the same elsewhere or faster. A feature without whose tensors or keys a checkpoint cannot be
        read says so by ``affects_checkpoint``. Values are JSON types.
        """
        return {}

    @classmethod
    def hooks(cls) -> dict[str, Callable[..., Any]]:
        """Return the hook implementations of the class, by stage name."""
        known = _HOOKS.get(cls)
        if known is None:
            known = _HOOKS[cls] = _hooks_of(cls)
        return dict(known)


_HOOKS: WeakKeyDictionary[type, dict[str, Callable[..., Any]]] = WeakKeyDictionary()
"""Of classes that were asked already: every plan asks each feature several times."""


def _hooks_of(cls: type) -> dict[str, Callable[..., Any]]:
    implementations: dict[str, Callable[..., Any]] = {}
    # Neither the base of all features nor `object` implements a stage.
    for klass in reversed(cls.__mro__[: cls.__mro__.index(Feature)]):
        for name, value in vars(klass).items():
            if hasattr(value, PROJECT + "_impl"):
                implementations[name] = value
            else:
                implementations.pop(name, None)
    return implementations
