"""``mindspeed-features completion SHELL``: click's completion script for a shell."""

from __future__ import annotations

import click

from mindspeed_core.cli.features import PROGRAM, program

VARIABLE = "_MINDSPEED_FEATURES_COMPLETE"


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  mindspeed-features completion bash > ~/.mindspeed-features.bash
           echo 'source ~/.mindspeed-features.bash' >> ~/.bashrc
    zsh:   mindspeed-features completion zsh > ~/.mindspeed-features.zsh
           echo 'source ~/.mindspeed-features.zsh' >> ~/.zshrc
    fish:  mindspeed-features completion fish > ~/.config/fish/completions/mindspeed-features.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:
        raise click.ClickException(f"click knows no completion for {shell}")
    # source() would ask the local shell for its version, and fail where that shell is not installed.
    complete = found(program, {}, PROGRAM, VARIABLE)
    click.echo(complete.source_template % complete.source_vars())
