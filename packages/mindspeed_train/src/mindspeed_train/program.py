"""The program ``mindspeed-train``: training from flags, and commands of the host and of packages.

``mindspeed-train FLAGS`` trains; ``mindspeed-train COMMAND`` runs a command of the host, or one that a
package adds through the entry-point group ``mindspeed.train_commands``. A command is the first word, or the
first one behind ``--nproc N``; training takes no words, so the two are never confused. The same program runs
under torchrun as ``torchrun … -m mindspeed_core.train FLAGS``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mindspeed_core.cli.commands import TRAIN_PROGRAM, TRAIN_WORDS
from mindspeed_core.discovery.entry_points import TRAIN_COMMANDS, load_object
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.terminal.errors import EXIT_INTERRUPTED, guarded, traceback_option
from mindspeed_core.terminal.program import print_click_error
from mindspeed_megatron.broken_packages import guard_imports
from mindspeed_train.interrupts import ends_at_once, raise_again
from mindspeed_train.output import settle_output

if TYPE_CHECKING:
    import click

    from mindspeed_core.registry import Registry

_COMPLETION = "_MINDSPEED_TRAIN_COMPLETE"
"""Variable through which a shell asks for completions."""
_LAUNCH_FLAGS = ("--nproc", "--max-restarts")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit status: 0 done, 1 a problem (printed), 2 wrong usage, 130 after Ctrl-C.

    Of wrong usage are words that mean nothing here: unknown commands and flags, values of the wrong type.
    """
    guard_imports()
    with (
        ends_at_once(for_good=argv is None),
        traceback_option(sys.argv[1:] if argv is None else argv) as arguments,
    ):
        return _main(arguments)


def _main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] == "--version":
        from mindspeed_core import __version__

        print(f"{TRAIN_PROGRAM} {__version__}")
        return 0
    if _COMPLETION in os.environ:
        return guarded(_complete)
    from mindspeed_train.program_help import HELP, print_first_steps, requested_topic

    launching, rest = _split(arguments)
    if rest and rest[0] == "completion":
        return guarded(lambda: _print_completion_script(rest[1:]))
    if not arguments:
        return guarded(print_first_steps)
    if rest and rest[0] in TRAIN_WORDS:
        return guarded(lambda: _help(HELP[0], rest[1] if len(rest) > 1 else ""))
    if rest and not rest[0].startswith("-"):
        return _command(launching, rest)
    topic = requested_topic(arguments)
    return _train(arguments) if topic is None else guarded(lambda: _help(*topic))


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags about processes that a command line begins with, and everything behind them."""
    end = 0
    while end < len(arguments):
        name, equals, _ = arguments[end].partition("=")
        if name not in _LAUNCH_FLAGS:
            break
        end += 1 if equals else 2
    return list(arguments[:end]), list(arguments[end:])


def _command(launching: Sequence[str], rest: Sequence[str]) -> int:
    """Run the command that ``rest`` begins with; a worker tells its supervisor the exit status."""
    import click

    from mindspeed_megatron.launch import worker
    from mindspeed_megatron.launch.failure import report

    def answer() -> int:
        try:
            return _run_command(launching, rest)
        except click.ClickException as error:
            if not worker.send_message("explained", _shown(error), status=error.exit_code):
                print_click_error(error)
            return error.exit_code
        except KeyboardInterrupt:
            if not worker.supervised():
                raise
            return EXIT_INTERRUPTED
        except BrokenPipeError:
            raise
        except Exception as error:
            return report(error)

    status = guarded(answer)
    if status:
        # The supervisor reads the first message of a worker: this one only where nothing was reported.
        worker.send_message("exit", "", status=status)
    return status


def _run_command(launching: Sequence[str], rest: Sequence[str]) -> int:
    """Run a command in this process, or in the workers that ``launching`` asks for."""
    from mindspeed_core.terminal.program import run_command
    from mindspeed_megatron.launch import environment, store, worker
    from mindspeed_megatron.quiet import quieten
    from mindspeed_train.launch import start
    from mindspeed_train.launch.commands import is_parallel

    name = rest[0]
    quieten()
    command = _load_command(name)
    launch = start.requested_launch(launching)
    if launch is not None and "--help" not in rest:
        if launch.max_restarts:
            reason = f"the command {name} is not started again after a failure"
            raise start.LaunchArgumentError("--max-restarts", launch.max_restarts, reason, "leave it out")
        if not is_parallel(command):
            reason = f"the command {name} works in one process"
            raise start.LaunchArgumentError("--nproc", launch.nproc, reason, "leave it out")
        return start.supervise(rest, launch, main)
    raise_again()
    if not is_parallel(command):
        return run_command(command, rest[1:], f"{TRAIN_PROGRAM} {name}")
    environment.translate_slurm(os.environ)
    if worker.supervised():
        worker.attach()
        store.serve_rendezvous()
    with environment.of_one_process(os.environ):
        return run_command(command, rest[1:], f"{TRAIN_PROGRAM} {name}")


def _shown(error: click.ClickException) -> str:
    from io import StringIO

    text = StringIO()
    print_click_error(error, text)
    return text.getvalue()


def _commands() -> Mapping[str, tuple[str, str]]:
    """Return the host's commands: where each is, and its line in ``--help``."""
    from mindspeed_core.registry import Registry

    return Registry.discover().host(DEFAULT_HOST).commands


def _load_command(name: str) -> click.Command:
    """Import a command of the host or of a package."""
    import click

    from mindspeed_core.cli import features
    from mindspeed_core.cli.commands import added_commands, load_added, suggestion

    own = _commands()
    added = added_commands(TRAIN_COMMANDS, (*TRAIN_WORDS, *own))
    if name in own:
        command: click.Command = load_object(own[name][0])
        return command
    if name in added:
        return load_added(name, added[name])
    if name in features.COMMANDS:
        raise click.UsageError(f"No command {name!r}. Did you mean {features.PROGRAM} {name}?")
    raise click.UsageError(f"No command {name!r}. {suggestion(name, [*own, *sorted(added)])}")


def _help(kind: str, name: str) -> int:
    """Print the short help, that of a family, or that of a flag."""
    from mindspeed_core.flags.flag_set import flag_set
    from mindspeed_core.registry import Registry
    from mindspeed_train import program_help as train_help

    registry = Registry.discover()
    flags = flag_set(registry, DEFAULT_HOST)
    if kind == train_help.HELP_FLAG:
        train_help.print_flag(flags, registry, name)
    elif name:
        train_help.print_family(flags, name)
    else:
        train_help.print_help(flags, _described_commands(registry))
    return 0


def _described_commands(registry: Registry) -> dict[str, str]:
    """Return what each sub-command does, or who brings it."""
    from mindspeed_core.cli.commands import added_commands, origin

    own = registry.host(DEFAULT_HOST).commands
    added = added_commands(TRAIN_COMMANDS, (*TRAIN_WORDS, *own))
    rows = {command: text for command, (_, text) in own.items()}
    rows |= {command: f"of {origin(added[command])}" for command in sorted(added)}
    return {**rows, "completion": "print the completion script of a shell"}


def _complete() -> int:
    """Answer a shell that asks for completions."""
    from mindspeed_core.flags.flag_set import flag_set
    from mindspeed_core.registry import Registry
    from mindspeed_train.program_completion import complete

    registry = Registry.discover()
    return complete(
        TRAIN_PROGRAM, flag_set(registry, DEFAULT_HOST), _described_commands(registry), _load_command
    )


def _print_completion_script(arguments: Sequence[str]) -> int:
    from mindspeed_train.program_completion import print_script

    return print_script(TRAIN_PROGRAM, arguments[0] if arguments else "")


def _train(arguments: Sequence[str]) -> int:
    from mindspeed_megatron.launch import environment, worker
    from mindspeed_megatron.launch.failure import report
    from mindspeed_megatron.quiet import quieten
    from mindspeed_train.launch import start

    quieten()
    try:
        environment.translate_slurm(os.environ)
        launch = start.requested_launch(arguments)
        if launch is not None and "--plan-only" not in arguments:
            return start.launch(arguments, launch, _train)
        worker.attach()
        from mindspeed_core.activation import prepare
        from mindspeed_train.launch.last_save import CommandLine

        session = prepare(arguments, host=DEFAULT_HOST)
        if session.args.plan_only:
            return _print_plan(arguments)
        session.state(CommandLine).arguments = tuple(arguments)
        with session:
            load_object(session.host.train)(session)
    except KeyboardInterrupt as interrupt:
        # One with an argument was explained already: the run saved first.
        if not worker.supervised() and not interrupt.args:
            print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        return report(error)
    finally:
        settle_output()
    return 0


def _print_plan(arguments: Sequence[str]) -> int:
    from mindspeed_core.cli.features import main as features

    kept = [argument for argument in arguments if argument != "--plan-only"]
    return features(["plan", "--", *kept])
