"""Changes that importing the adaptor makes: where a run begins, and where its arguments are read.

These few patches stay for the life of the process, so that ``pretrain`` can be called again; everything else
belongs to the session that one call of ``pretrain`` opens and closes. Apart from them nothing is changed by
the import, and nothing is printed.
"""

from __future__ import annotations

import functools
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.feature import Patch
from mindspeed_core.platforms.selection import AUTO, choose_platform, requested_platform
from mindspeed_core.registry import Registry
from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_megatron.hosts.megatron_lm import pretrain_call, script, session
from mindspeed_megatron.hosts.megatron_lm.command_line import CommandLine, asked_for
from mindspeed_megatron.hosts.megatron_lm.patch_table import ENTRIES, STARTUPS

OWNER = "megatron-lm adaptor"

_ledger = PatchLedger()
_registry: Registry | None = None
_extra: tuple[object, ...] = ()


def install(registry: Registry | None = None, extra_plugins: Sequence[object] = ()) -> None:
    """Let ``pretrain`` and the reading of its arguments go through this host; harmless when repeated.

    Args:
        registry: what is installed; read from the environment by default, when it is first needed.
        extra_plugins: further objects with hook implementations, outermost (test probes).
    """
    global _registry, _extra
    if registry is not None:
        _registry = registry
    _extra = tuple(extra_plugins) or _extra
    if not _ledger.listing():
        _ledger.apply([row.patch() for row in ENTRIES], owner=OWNER)


def uninstall() -> None:
    """Take back what `install` changed.

    Raises:
        PatchError: somebody has changed it in between.
    """
    global _registry, _extra
    _registry, _extra = None, ()
    _ledger.revert()


def entry_patches() -> list[Any]:
    """Return the patches of `install`, as a listing."""
    return _ledger.listing()


def _installed_registry() -> Registry:
    global _registry
    if _registry is None:
        _registry = Registry.discover()
    return _registry


def around_parse_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Intercept ``parse_args``: the parser gets the flags of every installed feature."""

    @functools.wraps(original)
    def parse_args(
        extra_args_provider: Callable[..., Any] | None = None, ignore_unknown_args: bool = False
    ) -> Any:
        given = sys.argv
        line = CommandLine(given[1:], _installed_registry())

        def provider(parser: Any) -> Any:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            line.extend(parser)
            if not ignore_unknown_args and not line.wants_help:
                with _reported():
                    line.check()
            if line.rewritten is not None:
                # The parser reads them next.
                sys.argv = [given[0], *line.rewritten]
            return parser

        try:
            args = original(provider, ignore_unknown_args)
        finally:
            sys.argv = given
        line.fill(args)
        now = pretrain_call.find()
        if now is not None:
            now.command_line = line
            with _reported():
                session.refuse_at_once(args, now.platform_kinds)
        return args

    return parse_args


def around_validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Intercept ``validate_args``: the plan is made and the session opens, then Megatron-LM validates."""

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **named: Any) -> Any:
        now = pretrain_call.find()
        if now is None or now.has_session or now.command_line is None:
            return original(args, *rest, **named)

        def validate(given: Any) -> Any:
            from mindspeed_megatron.hosts.megatron_lm.flag_ownership import standing_in

            with standing_in(now.session, given):
                result = original(given, *rest, **named)
            return given if result is None else result

        with _reported():
            opened = session.open_session(now, args, validate, _installed_registry(), _extra, entry_patches())
            # Stage modules are imported once the session is open, so that they see what it patched.
            from mindspeed_megatron.hosts.megatron_lm.parallel import meet

            meet(opened)
            return opened

    return validate_args


def around_pretrain(original: Callable[..., Any]) -> Callable[..., Any]:
    """Intercept ``pretrain``: its arguments become stages, and the session closes at its end."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def pretrain(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named)
        now = pretrain_call.begin()
        early = PatchLedger()
        failed = True
        try:
            now.platform_kinds = _make_available(early)
            if asked_for("--yaml-cfg", sys.argv[1:]):
                early.apply([row.patch() for row in STARTUPS], owner=OWNER)
            now.before_opening = early.revert
            script.take_over(now, bound.arguments)
            with _reported():
                result = original(*bound.args, **bound.kwargs)
            failed = False
            return result
        except SystemExit as stop:
            failed = stop.code not in (None, 0)
            raise
        finally:
            try:
                session.close_session(now, failed)
            finally:
                pretrain_call.end()
                early.revert()

    return pretrain


def _make_available(ledger: PatchLedger) -> frozenset[str]:
    """Let a device that is not CUDA's count as available until the session opens and says so itself.

    Returns:
        The kinds of the platform that will be used.
    """
    with _reported():
        registry = _installed_registry()
        early = Namespace(
            platform=asked_for("--platform", sys.argv[1:]) or AUTO,
            fake_process_group="--fake-process-group" in sys.argv,
        )
        name, _ = choose_platform(requested_platform(early), registry)
        kinds = registry.platform(name).kinds()
    if "cuda" not in kinds:
        available = Patch(
            "torch.cuda:is_available",
            "mindspeed_megatron.hosts.megatron_lm.emulation:says_available",
            "Megatron-LM asks before it reads its arguments",
            kind="wrap",
        )
        ledger.apply([available], owner=OWNER)
    return kinds


@contextmanager
def _reported() -> Iterator[None]:
    """End the program with one message for an error that the user can put right."""
    try:
        yield
    except UserError as error:
        from mindspeed_megatron.launch.failure import report

        raise SystemExit(report(error)) from None
