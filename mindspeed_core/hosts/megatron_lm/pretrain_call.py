"""One call of ``pretrain`` in progress: its session, its run, and the calls of Megatron-LM being intercepted.

An intercepted function calls a stage; the stage's innermost default comes back here for the original call,
with the arguments that Megatron-LM gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import SessionError
from mindspeed_core.run import Batch, DistInfo, Run

if TYPE_CHECKING:
    from mindspeed_core.hosts.megatron_lm.command_line import CommandLine
    from mindspeed_core.session import Session

_current: Running | None = None


@dataclass
class Call:
    """One intercepted call.

    Attributes:
        original: calls Megatron-LM's function; what the stage may change is its arguments.
        result: what it returned last.
        made: whether it was called; a feature may replace a stage and never call it.
    """

    original: Callable[..., Any]
    result: Any = None
    made: bool = False

    def __call__(self, *arguments: Any) -> Any:
        """Call the original and remember its result."""
        self.result = self.original(*arguments)
        self.made = True
        return self.result


class Running:
    """What one call of ``pretrain`` knows.

    Attributes:
        platform: name of the platform in use.
        session: open from the validation of the arguments on.
        command_line: the flags, read.
        run: the run's record, from the model on.
        dist: this process in the world, once torch.distributed runs.
        batch: the micro-batch that the script fetched last.
        configs: configurations that features have seen: as Megatron-LM made them, and as they became.
        saved: what features left in the checkpoint that is being loaded: facts, and state by feature.
        restored: the state of features that was loaded.
        test_iterators: iterators of the test split, to tell the splits apart.
        stages: what active features implement.
        before_opening: takes back what stood in for the session until it opens.
        script_opened: takes over names of the script once the session is open.
        optimizer_configured: the stage of the optimizer's configuration was reached.
        microbatches: how many each chunk has seen of the current step.
        fields: of a batch, by whether a stage holds the embedding and the output layer: what features want
            there, and what the script gives.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.platform = ""
        self.session: Session | None = None
        self.command_line: CommandLine | None = None
        self.run: Run | None = None
        self.dist: DistInfo | None = None
        self.batch = Batch()
        self.configs: list[tuple[type | None, Any, Any]] = []
        self.saved: dict[str, Any] = {}
        self.restored: dict[str, Any] = {}
        self.test_iterators: list[Any] = []
        self.stages: frozenset[str] = frozenset()
        self.before_opening: Callable[[], object] = _nothing
        self.script_opened: Callable[[], object] = _nothing
        self.optimizer_configured = False
        self.microbatches: dict[int | None, int] = {}
        self.fields: dict[tuple[bool, bool], tuple[frozenset[str], frozenset[str]]] = {}
        self._calls: dict[str, list[Call]] = {}

    def opened(self) -> Session:
        """The session.

        Raises:
            SessionError: the arguments have not been validated yet.
        """
        if self.session is None:
            raise SessionError("Megatron-LM has not validated its arguments yet: no session is open")
        return self.session

    def wants(self, *stages: str) -> bool:
        """Whether an active feature implements one of the stages."""
        return not self.stages.isdisjoint(stages)

    def present(self) -> Run:
        """The run, brought up to date with Megatron-LM's arguments.

        Raises:
            SessionError: there is no model yet.
        """
        if self.run is None:
            raise SessionError("Megatron-LM has not built a model yet: there is no run")
        args = self.run.args
        self.run.iteration = int(getattr(args, "curr_iteration", 0) or getattr(args, "iteration", 0) or 0)
        self.run.consumed_train_samples = args.consumed_train_samples
        self.run.consumed_valid_samples = args.consumed_valid_samples
        return self.run

    @contextmanager
    def calling(self, stage: str, original: Callable[..., Any]) -> Iterator[Call]:
        """Offer a call of Megatron-LM to the default of a stage."""
        call = Call(original)
        stack = self._calls.setdefault(stage, [])
        stack.append(call)
        try:
            yield call
        finally:
            stack.pop()

    def call(self, stage: str) -> Call | None:
        """The intercepted call of a stage, None where a feature asks for the stage by itself."""
        stack = self._calls.get(stage)
        return stack[-1] if stack else None

    def pending(self, stage: str) -> Call:
        """The intercepted call of a stage.

        Raises:
            SessionError: a feature calls the stage where Megatron-LM does not.
        """
        call = self.call(stage)
        if call is None:
            raise SessionError(
                f"stage {stage}: on the host megatron-lm its default can be called only from within the stage"
            )
        return call


def _nothing() -> None:
    """Nobody has asked for anything."""


def begin() -> Running:
    """Take a call of ``pretrain`` as the current one.

    Raises:
        SessionError: another one has not ended.
    """
    global _current
    if _current is not None:
        raise SessionError("pretrain is called within pretrain; one training runs in a process at a time")
    _current = Running()
    return _current


def end() -> None:
    """There is no current call any more."""
    global _current
    _current = None


def current() -> Running:
    """The current call of ``pretrain``.

    Raises:
        SessionError: there is none.
    """
    if _current is None:
        raise SessionError("no training of Megatron-LM is running")
    return _current


def find() -> Running | None:
    """The current call of ``pretrain``, if any."""
    return _current
