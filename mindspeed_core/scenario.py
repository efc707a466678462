"""Proofs of a feature as data: scenarios, their gains and resumes; parts of `mindspeed_core.feature`.

`mindspeed_testing.verify` trains them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import overload

from mindspeed_core.errors import DeclarationError


@dataclass(frozen=True)
class Gain:
    """Improvement by a feature, as bounds on a number that both sides have, or that the feature's side has.

    Attributes:
        measure: ``"peak_bytes"`` (tensor bytes alive during forward and backward), ``"forward_bytes"`` (most
            of them alive right after a forward pass), ``"host_bytes"`` (buffers for copies to the device),
            ``"sent_bytes"``, ``"collective_calls"``, ``"step_seconds"``, others of
            `mindspeed_testing.training.SideResult`, or a key of ``run.metrics``.
        at_most: upper bound of the ratio feature / baseline.
        exactly: the value with the feature; the baseline needs none.
        less: by how much the value is smaller than the baseline's, exactly.
        value_at_most: upper bound of the value with the feature; the baseline needs none.
        platforms: where the bounds hold; empty means everywhere.

    Without any bound, or on another platform, the ratio is only reported.
    """

    measure: str
    at_most: float | None = None
    exactly: float | None = None
    less: float | None = None
    value_at_most: float | None = None
    platforms: tuple[str, ...] = ()

    @property
    def demand(self) -> str:
        """Return what is demanded in words; empty where the ratio is only reported."""
        words = []
        if self.at_most is not None:
            words.append(f"at most {self.at_most:g} x")
        if self.exactly is not None:
            words.append(f"exactly {self.exactly:,.12g}")
        if self.less is not None:
            words.append(f"exactly {self.less:,.12g} less")
        if self.value_at_most is not None:
            words.append(f"a value of at most {self.value_at_most:,.12g}")
        return ", ".join(words)


QUANTITIES = ("losses", "gradients", "parameters", "learning rates", "feature state", "optimizer state")
"""Quantities that a proof can compare, each in a form that does not depend on the layout."""
LOADED = ("parameters", "feature state", "optimizer state")
"""Those that a load brings back, before any step."""


@dataclass(frozen=True)
class Resume:
    """Second half of a proof: stop at a checkpoint and continue, as before and in another layout.

    Attributes:
        flags: the whole command line of the other layout, the feature's flags included.
        world_size: processes of the other layout.
        steps: training steps after the checkpoint. 0 compares what was loaded: parameters, described
            moments and the state of features right after the load; for continuations that differ by design.
        tolerance: allowed distance of the continuation in the layout that wrote the checkpoint; 0.0 demands
            bit equality.
        with_feature: the feature is active in the other layout too; False shows that its checkpoints are read
            without it, for instance those of a split sequence by a rank that has it whole.
        warning: a part of a warning that loading in the other layout must give; empty for none.
    """

    flags: tuple[str, ...]
    world_size: int = 1
    steps: int = 2
    tolerance: float = 0.0
    with_feature: bool = True
    warning: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "flags", tuple(self.flags))
        if self.world_size < 1 or self.steps < 0:
            raise DeclarationError("Resume: world_size is at least 1, and steps at least 0")


@dataclass(frozen=True)
class Scenario:
    """Proof of a feature: short trainings that must agree, and the gains over the baseline.

    Both sides train the same small GPT from the same weights on the same batches; what ``compare`` names is
    compared in one canonical (unsharded) state. There are three kinds:

    - The plain kind trains with the feature and without it.
    - With ``same_feature`` both sides have the feature, in different layouts: a feature that changes the
      training is shown to change it alike wherever it runs.
    - With ``resume`` one training saves a checkpoint after ``steps`` steps and goes on; it is continued from
      that checkpoint in the same layout and in another one, and both must reach what it reached.

    Attributes:
        name: unique within the feature.
        flags: the command line of the feature's side.
        baseline: the command line it is compared with; the same model arguments without the feature.
        world_size: processes of the feature's side.
        baseline_world_size: processes of the baseline; 0 means the same as ``world_size``.
        steps: training steps.
        tolerance: largest ``max|a-b| / (max|b| + 1e-12)`` per tensor; 0.0 demands bit equality.
        gains: what must be better.
        compare_gradients: superseded by ``compare``; False leaves ``"gradients"`` out of it.
        platforms: where the scenario applies; empty means wherever the feature does.
        same_feature: the feature is active in the baseline too, and the layouts differ.
        compare: names out of `QUANTITIES`. Empty takes losses, gradients and parameters; with
            ``same_feature`` the state of features too, with ``resume`` everything.
        extra_losses: reported losses that the baseline lacks. Any other one that it lacks is a difference.
        extra_parameters: patterns (``"*.norm.gate"``) of parameters that the baseline lacks. They start as
            the feature sets them, and only those that both sides have are compared.
        files: small files that both sides get in a folder of their own, which the flags call ``{files}``:
            ``"package:relative/path"`` of a file, or ``"module:function"`` of a torch-free function that
            takes the folder (a ``pathlib.Path``) and writes into it.
        resume: how the training is continued from its checkpoint.
    """

    name: str
    flags: tuple[str, ...]
    baseline: tuple[str, ...] = ()
    world_size: int = 1
    baseline_world_size: int = 0
    steps: int = 3
    tolerance: float = 1e-5
    gains: tuple[Gain, ...] = ()
    compare_gradients: bool = True
    platforms: tuple[str, ...] = ()
    same_feature: bool = False
    compare: tuple[str, ...] = ()
    extra_losses: tuple[str, ...] = ()
    extra_parameters: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    resume: Resume | None = None

    def __post_init__(self) -> None:
        lists = ("flags", "baseline", "gains", "platforms", "compare", "extra_losses", "extra_parameters")
        for name in (*lists, "files"):
            value = getattr(self, name)
            if isinstance(value, tuple):
                continue
            if isinstance(value, str):
                raise DeclarationError(f"scenario {self.name}: {name} = {value!r} is a tuple: ({value!r},)")
            object.__setattr__(self, name, tuple(value))
        if self.world_size < 1 or self.steps < 1:
            raise DeclarationError(f"scenario {self.name}: world_size and steps are at least 1")
        for wrong in self._contradictions():
            raise DeclarationError(f"scenario {self.name}: {wrong}")

    @property
    def quantities(self) -> tuple[str, ...]:
        """Return the names out of `QUANTITIES` that this proof compares."""
        names = self.compare
        if not names and self.resume is not None:
            names = QUANTITIES if self.resume.steps else LOADED
        if not names:
            names = (*QUANTITIES[:3], *(("feature state",) if self.same_feature else ()))
        return tuple(name for name in names if name != "gradients" or self.compare_gradients)

    def sides(self) -> tuple[tuple[str, tuple[str, ...], bool], ...]:
        """Return what each side is called, its command line, and whether the feature is active on it."""
        if self.resume is not None:
            return ("flags", self.flags, True), ("resume", self.resume.flags, self.resume.with_feature)
        return ("flags", self.flags, True), ("baseline", self.baseline, self.same_feature)

    def _contradictions(self) -> Iterator[str]:
        for name in self.compare:
            if name not in QUANTITIES:
                yield f"compare names {name!r}; it can name {', '.join(QUANTITIES)}"
        lines = [flags for _, flags, _ in self.sides()]
        if bool(self.files) != any("{files}" in " ".join(flags) for flags in lines):
            yield "files are listed exactly where flags refer to their folder as {files}"
        if self.resume is not None:
            if self.baseline or self.baseline_world_size or self.gains or self.same_feature:
                yield (
                    "a proof that resumes compares with its own uninterrupted run: no baseline, "
                    "same_feature or gains"
                )
            if self.extra_losses or self.extra_parameters:
                yield "a proof that resumes has the same losses and parameters everywhere"
            if (self.flags, self.world_size) == (self.resume.flags, self.resume.world_size):
                yield "resume continues in the same layout anyway; give the flags of another one"
        alike = self.flags == self.baseline and self.baseline_world_size in (0, self.world_size)
        if self.same_feature and alike:
            yield "with same_feature the layouts of both sides differ"


class Proofs(Sequence[Scenario]):
    """Scenarios in modules of their own, which are imported when somebody reads the proofs.

    Listing and planning read none, and the proofs of all features are a tenth of what they would import.
    """

    def __init__(self, *places: str) -> None:
        """Name the places, each ``"module:NAME"`` of a sequence of scenarios."""
        self._places = places
        self._scenarios: tuple[Scenario, ...] | None = None

    def _loaded(self) -> tuple[Scenario, ...]:
        """Return the scenarios of all places.

        Raises:
            DeclarationError: a place does not name scenarios.
        """
        if self._scenarios is None:
            scenarios: list[Scenario] = []
            for place in self._places:
                module, _, name = place.partition(":")
                declared = getattr(import_module(module), name)
                if any(not isinstance(scenario, Scenario) for scenario in declared):
                    raise DeclarationError(f"verify: {place} holds something other than a Scenario")
                scenarios += declared
            self._scenarios = tuple(scenarios)
        return self._scenarios

    @overload
    def __getitem__(self, index: int) -> Scenario: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Scenario, ...]: ...
    def __getitem__(self, index: int | slice) -> Scenario | tuple[Scenario, ...]:
        """Return one scenario, or some."""
        return self._loaded()[index]

    def __len__(self) -> int:
        """Return the number of scenarios."""
        return len(self._loaded())
