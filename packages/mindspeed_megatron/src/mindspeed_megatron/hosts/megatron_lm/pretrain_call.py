"""One call of ``pretrain`` in progress: its session, its run, and the calls of Megatron-LM being intercepted.

An intercepted function calls a stage; the stage's innermost default fetches the original call from here, with
the arguments that Megatron-LM gave it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import SessionError
from mindspeed_core.run import Batch, DistInfo, Run
from mindspeed_megatron.hosts.megatron_lm.dropout_generator import DropoutGenerator
from mindspeed_megatron.hosts.megatron_lm.reported import reported

if TYPE_CHECKING:
    from mindspeed_core.session import Session
    from mindspeed_megatron.hosts.megatron_lm.command_line import CommandLine
    from mindspeed_megatron.model_state import Selection

_current: PretrainCall | None = None


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


class PretrainCall:
    """State of one call of ``pretrain``, and of the reading of its arguments where that comes before it.

    Attributes:
        platform_kinds: kinds of the platform in use, known before the session opens.
        command_line: the flags, read.
        dist: this process in the world, once torch.distributed runs.
        batch: the micro-batch that the script fetched last.
        describes_beside: a feature's description of a batch reaches the model beside the script.
        described_by_script: that of the micro-batch that the script fetched last.
        reports: what the micro-batches of the last schedule reported.
        configs: configurations that features have seen: as Megatron-LM made them, and as they became.
        saved: what features left in the checkpoint that is being loaded: facts, and state by feature.
        restored: the state of features that was loaded.
        source: folder whose weights are being loaded for a feature, None otherwise.
        weights: the weights that features chose for the load in progress.
        model_compared: the model of the checkpoint that is being loaded was compared with the run's.
        groups: constants of the optimizer's groups of parameters, as the flags give them.
        load_called: whether Megatron-LM came to its loading.
        test_iterators: iterators of the test split, to tell the splits apart.
        stages: what active features implement.
        before_opening: takes back what stood in for the session until it opens.
        script_opened: takes over names of the script once the session is open.
        optimizer_configured: the stage of the optimizer's configuration was reached.
        handed: arguments of the script's ``model_provider``; none where the session opens before it is known.
        seeded: generators were seeded anew for the model.
        began: the stage ``start_run`` was called.
        generator: the generator of dropout, kept from data loaders on CPU.
        left_alone: files that a dry run neither reads nor writes, by argument.
        fields: fields of a batch that features want, and those that the script gives, by whether a pipeline
            stage holds the embedding and whether it holds the output layer.
        tells_padding: features say which positions are no tokens, and routers of experts hear of it.
        padding_mask: of the micro-batch that the script fetched last, bool ``[b, s]``; None without padding.
        reads_any_length: micro-batches reach tensor-parallel ranks in whatever length they have.
        in_pretrain: Megatron-LM's function runs; scripts of core_v0.18 and later read their arguments before.
    """

    def __init__(self) -> None:
        self.platform_kinds: frozenset[str] = frozenset()
        self.command_line: CommandLine | None = None
        self.dist: DistInfo | None = None
        self.batch = Batch()
        self.describes_beside = False
        self.described_by_script: Any = None
        self.reports: Sequence[Mapping[str, Any]] = ()
        self.configs: list[tuple[type | None, Any, Any]] = []
        self.saved: dict[str, Any] = {}
        self.restored: dict[str, Any] = {}
        self.source: str | None = None
        self.weights: Selection | None = None
        self.model_compared = False
        self.groups: Sequence[dict[str, Any]] = ()
        self.load_called = False
        self.test_iterators: list[Any] = []
        self.stages: frozenset[str] = frozenset()
        self.before_opening: Callable[[], object] = lambda: None
        self.script_opened: Callable[[], object] = lambda: None
        self.optimizer_configured = False
        self.handed: frozenset[str] = frozenset()
        self.seeded = False
        self.began = False
        self.generator = DropoutGenerator()
        self.fields: dict[tuple[bool, bool], tuple[frozenset[str], frozenset[str]]] = {}
        self.tells_padding = False
        self.padding_mask: Any = None
        self.reads_any_length = False
        self.left_alone: dict[str, str] = {}
        self.in_pretrain = False
        self._session: Session | None = None
        self._run: Run | None = None
        self._calls: dict[str, list[Call]] = {}

    @property
    def has_session(self) -> bool:
        """True once the arguments have been validated and a session is open."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """The session, open from the validation of the arguments on.

        Raises:
            SessionError: the arguments have not been validated yet.
        """
        if self._session is None:
            raise SessionError("Megatron-LM has not validated its arguments yet: no session is open")
        return self._session

    @session.setter
    def session(self, session: Session) -> None:
        self._session = session

    @property
    def has_run(self) -> bool:
        """True once there is a model, and so a run."""
        return self._run is not None

    @property
    def run(self) -> Run:
        """The run's record, from the model on.

        Raises:
            SessionError: there is no model yet.
        """
        if self._run is None:
            raise SessionError("Megatron-LM has not built a model yet: there is no run")
        return self._run

    @run.setter
    def run(self, run: Run) -> None:
        self._run = run

    def sync_run(self) -> Run:
        """Return the run, brought up to date with Megatron-LM's arguments.

        Raises:
            SessionError: there is no model yet.
        """
        run, args = self.run, self.run.args
        run.iteration = int(getattr(args, "curr_iteration", 0) or getattr(args, "iteration", 0) or 0)
        run.consumed_train_samples = args.consumed_train_samples
        run.consumed_valid_samples = args.consumed_valid_samples
        return run

    def wants(self, *stages: str) -> bool:
        """Return whether an active feature implements one of the stages."""
        return not self.stages.isdisjoint(stages)

    def features_in(self, stage: str) -> list[str]:
        """Return the active features that implement a stage, in the order of the plan."""
        features = self.session.registry.features
        return [name for name in self.session.plan.names if stage in features[name].cls.hooks()]

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
        """Return the intercepted call of a stage, None where a feature asks for the stage by itself."""
        stack = self._calls.get(stage)
        return stack[-1] if stack else None

    def pending(self, stage: str) -> Call:
        """Return the intercepted call of a stage.

        Raises:
            SessionError: a feature calls the stage where Megatron-LM does not.
        """
        call = self.call(stage)
        if call is None:
            raise SessionError(
                f"stage {stage}: on the host megatron-lm its default can be called only from within the stage"
            )
        return call


def begin() -> PretrainCall:
    """Make a call of ``pretrain`` the current one.

    Raises:
        SessionError: another one has not ended.
    """
    global _current
    if _current is not None:
        raise SessionError("pretrain is called within pretrain; one training runs in a process at a time")
    _current = PretrainCall()
    return _current


def end() -> None:
    """Clear the current call of ``pretrain``."""
    global _current
    _current = None


def current() -> PretrainCall:
    """Return the current call of ``pretrain``.

    Raises:
        SessionError: there is none.
    """
    if _current is None:
        raise SessionError("no training of Megatron-LM is running")
    return _current


def find() -> PretrainCall | None:
    """Return the current call of ``pretrain``, if any."""
    return _current


def intercepts(*, run: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make an interception of a function ``(now, original, ...)`` that is used while a session is open.

    Outside of that, Megatron-LM's function is called as if it were not intercepted.

    Args:
        run: the interception also needs a run, which exists once there is a model.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def intercepted(*args: Any, **named: Any) -> Any:
                now = _current
                if now is None or not now.has_session or (run and not now.has_run):
                    return original(*args, **named)
                if now.in_pretrain:
                    return body(now, original, *args, **named)
                with reported():
                    return body(now, original, *args, **named)

            return intercepted

        return around

    return decorate


def arguments_of(original: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Bind the arguments of an intercepted call to the parameters of Megatron-LM's function."""
    return inspect.signature(original).bind(*args, **named)
