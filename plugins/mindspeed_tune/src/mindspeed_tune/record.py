"""Record of one rank: what a step of it keeps, computes and communicates, as plain data.

A process that runs a rank on fake tensors writes one; everything else reads them. A record survives JSON, so
that a plan can be read again and ranks can be planned on different machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mindspeed_tune.layout import Layout
from mindspeed_tune.rank_lists import RankList


@dataclass(frozen=True)
class Group:
    """A process group that the rank is in.

    Attributes:
        name: its description, ``TENSOR_MODEL_PARALLEL_GROUP`` or ``cp.ring``.
        ranks: global ranks.
    """

    name: str
    ranks: RankList


@dataclass(frozen=True)
class Call:
    """One communication call.

    Attributes:
        group: index into the groups of the record.
        operation: ``all_reduce``, ``isend``.
        bytes: of this rank's input; of a receive, of the tensor that is received.
        dtype: of the tensor, ``bfloat16``.
        peer: global rank on the other side of a send or receive; None for collectives.
        phase: ``forward``, ``backward``, ``gradients``, ``update`` or ``setup``.
        stack: lines of code that led to it, innermost first; empty where they were not recorded.
        launch_event: place of the launch among all launches and waits of the rank.
        wait_event: place of the first wait among them; None without one.
        batch: number of the coalesced batch that holds the call; None outside of one.
        creates: it is the first of its communicator, which is made by it.
    """

    group: int
    operation: str
    bytes: int
    dtype: str
    peer: int | None = None
    phase: str = ""
    stack: tuple[str, ...] = ()
    launch_event: int = 0
    wait_event: int | None = None
    batch: int | None = None
    creates: bool = False


@dataclass(frozen=True)
class LargeTensor:
    """A tensor alive at the peak.

    Attributes:
        bytes: of its storage.
        category: what it is, as in `Memory`.
        module: path of the module in whose forward pass it was made; empty outside of modules.
        operator: that made it.
        stack: lines of code, innermost first.
    """

    bytes: int
    category: str
    module: str = ""
    operator: str = ""
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Peak:
    """Bytes alive at a peak.

    Attributes:
        categories: by what they are: parameters, gradients, activations, …
        modules: those of activations by the class of module that keeps them.
        largest: the largest tensors among them.
        operator: during which the peak was reached.
        stack: lines of code of it, innermost first.
    """

    categories: Mapping[str, float]
    modules: Mapping[str, float] = field(default_factory=dict)
    largest: tuple[LargeTensor, ...] = ()
    operator: str = ""
    stack: tuple[str, ...] = ()

    @property
    def bytes(self) -> float:
        """Return all bytes alive."""
        return sum(self.categories.values())


@dataclass(frozen=True)
class Run:
    """One pass of the schedule over some micro-batches.

    Attributes:
        microbatches: how many.
        layers: layers of each kind that ran, in all chunks together; empty for all of them.
        in_flight: micro-batches (chunks of them, with interleaving) whose activations were alive at once.
        peak: of memory.
        calls: all communication, in order.
        work: operations by chunk and direction (``"0 forward"``), then by what they are.
        steps: the order in which micro-batches ran: ``(direction, chunk, micro-batch)``.
    """

    microbatches: int
    layers: Mapping[str, int]
    in_flight: int
    peak: Peak
    calls: tuple[Call, ...] = ()
    work: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    steps: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Update:
    """The update behind the schedule: gradients to their owners, optimizer, parameters back.

    Attributes:
        peak: of memory.
        after: bytes by category when it is done.
        calls: its communication, in order.
        work: operations by what they are.
    """

    peak: Peak
    after: Mapping[str, float] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    work: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """Contents of a pipeline stage.

    Attributes:
        chunks: kinds of the layers of every model chunk, in order.
        embedding: it has the input embedding.
        head: it has the output layer and the loss.
        predictions: layers of multi-token prediction.
    """

    chunks: tuple[tuple[str, ...], ...]
    embedding: bool = False
    head: bool = False
    predictions: int = 0

    @property
    def layers(self) -> dict[str, int]:
        """Return the number of layers of each kind."""
        found: dict[str, int] = {}
        for chunk in self.chunks:
            for kind in chunk:
                found[kind] = found.get(kind, 0) + 1
        return found


@dataclass(frozen=True)
class Answer:
    """A number that the run read from a tensor without values, and what it was told."""

    file: str
    line: int
    value: str
    count: int


@dataclass(frozen=True)
class Relief:
    """A feature that is not active, and what it would keep where it takes part.

    Attributes:
        feature: its name.
        flags: that switch it on.
        roles: of the modules that it replaces.
        kept: bytes of a micro-batch that they would keep for backward, in all layers of the rank.
    """

    feature: str
    flags: str
    roles: tuple[str, ...]
    kept: float

    def concerns(self, module: str) -> bool:
        """Return whether a module, given by its path, is one of those or within one."""
        return bool(set(self.roles).intersection(module.split(".")))


@dataclass(frozen=True)
class Backend:
    """The platform's communication backend: its memory that is no tensor, and its rules.

    Attributes:
        bytes: the most of any call; 0 where the platform declares none.
        call: the call: operation and group.
        communicators: bytes of the buffers that communicators keep for themselves.
        rules: names of the contracts that every call was held to.
        made_late: calls that make a communicator behind a collective under way, a line each.
    """

    bytes: float = 0.0
    call: str = ""
    communicators: float = 0.0
    rules: tuple[str, ...] = ()
    made_late: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankRecord:
    """One rank of a launch.

    Attributes:
        rank: which.
        layout: of the launch.
        stages: of all pipeline ranks, in order.
        microbatches: of a whole step.
        static: bytes by category when everything is built, before the first step.
        runs: passes of the schedule; the first one is what the order check compares.
        update: the update.
        groups: in order of creation.
        answers: numbers that were read.
        incomplete: features whose part is not, or not exactly, counted, with the reason.
        sizes: numbers of the training for closed forms: ``seq_length``, ``hidden_size``, …
        flags: switches of the training for closed forms and advice.
        features: that are active, in plan order.
        host_bytes: tensors in host memory.
        cost: CPU seconds and peak resident bytes of the process.
        backend: what the communication backend takes, by what the platform declares of it.
        reliefs: what features that are not active would keep less.
    """

    rank: int
    layout: Layout
    stages: tuple[Stage, ...]
    microbatches: int
    static: Mapping[str, float]
    runs: tuple[Run, ...]
    update: Update
    groups: tuple[Group, ...] = ()
    answers: tuple[Answer, ...] = ()
    incomplete: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    host_bytes: float = 0
    cost: Mapping[str, float] = field(default_factory=dict)
    backend: Backend = Backend()
    reliefs: tuple[Relief, ...] = ()

    @property
    def stage(self) -> int:
        """Return the rank's pipeline stage."""
        return self.layout.place(self.rank)["pp"]

    @property
    def microbatch_group(self) -> int | None:
        """Return the micro-batches that an interleaved chunk runs in a row; None is the pipeline size."""
        return int(self.sizes.get("microbatch_group_size", 0)) or None

    @property
    def calls(self) -> tuple[Call, ...]:
        """Return the calls that the order check compares: of the first pass and of the update."""
        return (*self.runs[0].calls, *self.update.calls)

    def as_json(self) -> dict[str, Any]:
        """Return the record for a JSON file."""
        found = asdict(self)
        found["layout"] = self.layout.as_json()
        found["groups"] = [{"name": group.name, "ranks": group.ranks.as_json()} for group in self.groups]
        return found

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> RankRecord:
        """Return the record that `as_json` wrote."""
        return cls(
            **{
                **fields,
                "layout": Layout(**fields["layout"]),
                "stages": tuple(
                    Stage(**{**stage, "chunks": tuple(map(tuple, stage["chunks"]))})
                    for stage in fields["stages"]
                ),
                "runs": tuple(map(_run, fields["runs"])),
                "update": Update(
                    **{
                        **fields["update"],
                        "peak": _peak(fields["update"]["peak"]),
                        "calls": tuple(map(_call, fields["update"]["calls"])),
                    }
                ),
                "groups": tuple(
                    Group(group["name"], RankList.from_json(group["ranks"])) for group in fields["groups"]
                ),
                "answers": tuple(Answer(**answer) for answer in fields["answers"]),
                "features": tuple(fields["features"]),
                "backend": Backend(
                    **{
                        **fields["backend"],
                        "rules": tuple(fields["backend"]["rules"]),
                        "made_late": tuple(fields["backend"]["made_late"]),
                    }
                ),
                "reliefs": tuple(
                    Relief(**{**relief, "roles": tuple(relief["roles"])}) for relief in fields["reliefs"]
                ),
            }
        )


def _run(found: Mapping[str, Any]) -> Run:
    return Run(
        **{
            **found,
            "peak": _peak(found["peak"]),
            "calls": tuple(map(_call, found["calls"])),
            "steps": tuple((direction, chunk, number) for direction, chunk, number in found["steps"]),
        }
    )


def _peak(found: Mapping[str, Any]) -> Peak:
    largest = tuple(LargeTensor(**{**one, "stack": tuple(one["stack"])}) for one in found["largest"])
    return Peak(**{**found, "largest": largest, "stack": tuple(found["stack"])})


def _call(found: Mapping[str, Any]) -> Call:
    return Call(**{**found, "stack": tuple(found["stack"])})
