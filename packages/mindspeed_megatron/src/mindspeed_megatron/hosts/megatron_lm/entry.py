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
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

from mindspeed_core.errors import SessionError, UserError
from mindspeed_core.feature import Patch
from mindspeed_core.platforms.selection import AUTO, choose_platform, requested_platform
from mindspeed_core.registry import Registry
from mindspeed_core.runtime.patches import PatchLedger
from mindspeed_megatron.hosts.megatron_lm import pretrain_call, script, session
from mindspeed_megatron.hosts.megatron_lm.checkout import takes_settings
from mindspeed_megatron.hosts.megatron_lm.command_line import CommandLine, asked_for
from mindspeed_megatron.hosts.megatron_lm.patch_table import ENTRIES, STARTUPS
from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall
from mindspeed_megatron.hosts.megatron_lm.reported import reported

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
    now = pretrain_call.find()
    if now is not None and not now.in_pretrain:
        _finish(now, failed=True)
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
        if not _script_reads_first():
            return read(extra_args_provider, ignore_unknown_args)
        before = pretrain_call.find()
        if before is not None and before.in_pretrain:
            return read(extra_args_provider, ignore_unknown_args)
        if before is not None:
            # Arguments that no training came of; those that are read now are of another one.
            _finish(before, failed=True)
        with _ended_by_failure(_start()):
            return read(extra_args_provider, ignore_unknown_args)

    def read(extra_args_provider: Callable[..., Any] | None, ignore_unknown_args: bool) -> Any:
        given = sys.argv
        line = CommandLine(given[1:], _installed_registry())

        def provider(parser: Any) -> Any:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            line.extend(parser)
            if not ignore_unknown_args and not line.wants_help:
                with reported():
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
            with reported():
                session.refuse_at_once(args, now.platform_kinds, again=not now.in_pretrain)
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

        with nullcontext() if now.in_pretrain else _ended_by_failure(now), reported():
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
        if takes_settings(original):
            with reported():
                now = _arguments_read()
        else:
            now = _start()
        failed = True
        try:
            now.in_pretrain = True
            with reported():
                script.take_over(now, bound.arguments)
                result = original(*bound.args, **bound.kwargs)
            failed = False
            return result
        except SystemExit as stop:
            failed = stop.code not in (None, 0)
            raise
        finally:
            _finish(now, failed)

    return pretrain


def _script_reads_first() -> bool:
    """Return whether scripts of this checkout read their arguments before they call ``pretrain``."""
    return takes_settings(import_module("megatron.training.training").pretrain)


def _arguments_read() -> PretrainCall:
    """Return what the script began by reading its arguments.

    Raises:
        UserError: it has not read them for this training; flags of features would be ignored.
        SessionError: another training has not ended.
    """
    now = pretrain_call.find()
    if now is None or not now.has_session:
        raise UserError(
            "pretrain is called with settings that are not those of a command line, which flags of features "
            "are read from; call parse_and_validate_args before each call of pretrain, or train with "
            "mindspeed-train"
        )
    if now.in_pretrain:
        raise SessionError("pretrain is called within pretrain; one training runs in a process at a time")
    return now


def _start() -> PretrainCall:
    """Begin a training: the platform is chosen, and its device counts as available."""
    now = pretrain_call.begin()
    early = PatchLedger()
    now.before_opening = early.revert
    with _ended_by_failure(now):
        now.platform_kinds = _make_available(early)
        if asked_for("--yaml-cfg", sys.argv[1:]):
            early.apply([row.patch() for row in STARTUPS], owner=OWNER)
    return now


def _finish(now: PretrainCall, failed: bool) -> None:
    """End a training: everything but the patches of the import is as it was."""
    try:
        session.close_session(now, failed)
    finally:
        pretrain_call.end()
        now.before_opening()


@contextmanager
def _ended_by_failure(now: PretrainCall) -> Iterator[None]:
    """End a training whose start does not come about."""
    try:
        yield
    except BaseException:
        _finish(now, failed=True)
        raise


def _make_available(ledger: PatchLedger) -> frozenset[str]:
    """Let a device that is not CUDA's count as available until the session opens and says so itself.

    Returns:
        The kinds of the platform that will be used.
    """
    with reported():
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
