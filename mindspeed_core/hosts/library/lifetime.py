"""The life of a session inside somebody else's program: opened again, left for a while, followed by another.

A framework that trains several models in one process goes from one session to the next and back, while the
models of each live on. So nothing that belongs to a model is lost when its session closes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from mindspeed_core.errors import SessionError
from mindspeed_core.run import Run
from mindspeed_core.session import Session

if TYPE_CHECKING:
    from mindspeed_core.activation import Flags

Own = TypeVar("Own", bound="LastingSession")


class LastingSession(Session):
    """A session that can be opened again as it was: features' state, groups and changed instances.

    Attributes:
        run: the training as features see it: configuration, model, optimizer, iteration. One session drives
            one trained model; a second trained model has a session of its own.
    """

    def __init__(self, *positional: Any, **named: Any) -> None:
        """Put a session together, as `Session` does; nothing happens before it is opened."""
        super().__init__(*positional, **named)
        absent: Any = None
        self.run = Run(session=self, args=self.args, config=absent, pg=absent, dist=absent, model=[])
        self._models: list[weakref.ref[Any]] = []
        self._situated = False
        self._started = False
        self._entered_open = False

    def open(self: Own) -> Own:
        """Open the session, or open it again as it was: groups, features' state and changed instances."""
        super().open()
        try:
            self.instances.resume()
            if not self.groups.reclaim():
                self._situated = False
        except BaseException:
            self._end()
            raise
        return self

    def __enter__(self: Own) -> Own:
        """Open the session unless it is open."""
        self._entered_open = self.is_open
        return self if self.is_open else self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close an activated session for good; leave one that was opened by entering, to be entered again."""
        if self._entered_open and error is None:
            self.close(force=True)
        else:
            self._end()

    def close(self, *, force: bool = False) -> None:
        """End the session: everything it changed is as it was before.

        Models built with it go on working, except for those that a feature keeps working only while the
        session is open. Process groups are kept for the next session of this process.

        Args:
            force: close although such a model lives; it must not be used any more.

        Raises:
            SessionError: such a model lives.
        """
        if not self.is_open:
            return
        if not force:
            self._refuse_to_leave_models()
        try:
            if self._started:
                self._started = False
                self.call("finish_run", run=self.run)
        finally:
            self._end()

    def reopen(self: Own, flags: Flags, *, configs: Sequence[object] = ()) -> Own:
        """Close this session and open one with other flags, on the same platform and registry.

        Args:
            flags: all flags of the new session, in any form that `mindspeed_core.activate` takes.
            configs: as there.

        Returns:
            The new session; this one stays closed. Process groups with the same ranks and options are reused.

        Raises:
            mindspeed_core.resolver.plan.PlanError: the flags cannot be resolved; this session stays open.
            SessionError: a model needs this session.
        """
        from mindspeed_core.activation import prepare

        following: Any = prepare(
            flags,
            host=self.host.name,
            platform=self.plan.platform,
            mode=self.mode,
            registry=self.registry,
            configs=configs,
            extra_plugins=self._extra_plugins,
        )
        self.close()
        opened: Own = following.open()
        return opened

    def watch(self, chunks: Iterable[Any]) -> None:
        """Remember models of this session, without keeping them alive."""
        self._models += [weakref.ref(chunk) for chunk in chunks]

    def _refuse_to_leave_models(self) -> None:
        names = [feature.name for feature in self._feature_classes if feature.needs_open_session]
        living = sum(model() is not None for model in self._models)
        if names and living:
            raise SessionError(
                f"{living} model chunk{'s' if living > 1 else ''} built with {', '.join(names)} still "
                "live, and work only while this session is open; delete them, or close(force=True) and do "
                "not use them again"
            )

    def _leave_instances(self) -> None:
        self.instances.suspend()

    def _leave_groups(self) -> None:
        self.groups.release()
