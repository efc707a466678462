"""The program ``mindspeed-train``: training from flags, and the commands of the host.

``mindspeed-train FLAGS`` trains; ``mindspeed-train COMMAND`` runs a command that the host declares. The same
program runs under torchrun as ``torchrun … -m mindspeed_core.train FLAGS``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mindspeed_core.discovery.entry_points import load_object
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.terminal.errors import guarded

_USAGE = """usage: mindspeed-train FLAGS             train (here, or as a worker of torchrun or srun)
       mindspeed-train --nproc N FLAGS   train with N processes on this machine
       mindspeed-train COMMAND ...       run a tool

commands:
{commands}

Flags have Megatron-LM's names. `mindspeed-features plan -- FLAGS` shows what they switch on.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit status: 0 done, 1 a problem (printed), 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] == "--version":
        from mindspeed_core import __version__

        print(f"mindspeed-train {__version__}")
        return 0
    if not arguments or arguments[0] == "help":
        return _help()
    if not arguments[0].startswith("-"):
        return _run_command(arguments)
    return _help() if {"-h", "--help"} & set(arguments) else _train(arguments)


def _run_command(arguments: Sequence[str]) -> int:
    from mindspeed_core.registry import Registry
    from mindspeed_core.terminal.quiet import quieten

    name = arguments[0]
    commands = Registry.discover().host(DEFAULT_HOST).commands
    if name not in commands:
        from difflib import get_close_matches

        close = get_close_matches(name, commands, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f" (commands: {', '.join(commands)})"
        print(f"mindspeed-train: no command {name!r}{hint}", file=sys.stderr)
        return 2
    quieten()
    command = load_object(commands[name][0])
    return guarded(lambda: command.main(arguments[1:], f"mindspeed-train {name}", standalone_mode=False))


def _help() -> int:
    from mindspeed_core.flags.flag_set import flag_set
    from mindspeed_core.registry import Registry

    registry = Registry.discover()
    commands = registry.host(DEFAULT_HOST).commands
    width = max(map(len, commands), default=0)
    lines = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in commands.items())
    print(_USAGE.format(commands=lines))
    print(flag_set(registry, DEFAULT_HOST).format_help())
    return 0


def _train(arguments: Sequence[str]) -> int:
    from mindspeed_core.launch import environment, start, worker
    from mindspeed_core.terminal.failure import report
    from mindspeed_core.terminal.quiet import quieten

    quieten()
    try:
        environment.translate_slurm(os.environ)
        launch = start.requested_launch(arguments)
        if launch is not None and "--plan-only" not in arguments:
            return start.launch(arguments, launch, _train)
        worker.attach()
        from mindspeed_core.activation import prepare

        session = prepare(arguments, host=DEFAULT_HOST)
        if session.args.plan_only:
            return _print_plan(arguments)
        with session:
            load_object(session.host.train)(session)
    except KeyboardInterrupt:
        if not worker.supervised():
            print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return report(error)
    return 0


def _print_plan(arguments: Sequence[str]) -> int:
    from mindspeed_core.cli.features import main as features

    kept = [argument for argument in arguments if argument != "--plan-only"]
    return features(["plan", "--", *kept])
