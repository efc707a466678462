"""``mindspeed-features completion SHELL``: click's completion script for a shell."""

from __future__ import annotations

import click

from mindspeed_core.cli.features import PROGRAM, program

VARIABLE = "_MINDSPEED_FEATURES_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion script of SHELL; mindspeed-train completion SHELL prints that of mindspeed-train.

    \b
    bash:  mindspeed-features completion bash > ~/.mindspeed-features.bash
           echo 'source ~/.mindspeed-features.bash' >> ~/.bashrc
    zsh:   mindspeed-features completion zsh > ~/.mindspeed-features.zsh
           echo 'source ~/.mindspeed-features.zsh' >> ~/.zshrc
    fish:  mindspeed-features completion fish > ~/.config/fish/completions/mindspeed-features.fish
    """
    click.echo(completion_script(program, PROGRAM, VARIABLE, shell))


def completion_script(asked: click.Command, name: str, variable: str, shell: str) -> str:
    """Return click's completion script.

    Args:
        asked: the command that answers the shell.
        name: what the shell calls the program.
        variable: the environment variable through which the shell asks.
        shell: one of `SHELLS`.
    """
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise click.ClickException(f"click knows no completion for {shell}")
    # source() would ask the local shell for its version, and fail where that shell is not installed.
    complete = completion_class(asked, {}, name, variable)
    return complete.source_template % complete.source_vars()
