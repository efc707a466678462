"""Flags that name a model and its layout, shared by the commands that load one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindspeed_models.data.templates import template_names
from mindspeed_train.interface import parallel_command

if TYPE_CHECKING:
    from mindspeed_models.inference.loaded import LoadedModel
    from mindspeed_models.serving.prompts import Prompts

_SIZE = click.IntRange(1)
_TEMPLATES = ", ".join(template_names())
_WORDS = "mindspeed_models_command_line"
_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--load",
        metavar="PATH",
        required=True,
        help="Folder of Hugging Face, of a training, or of a checkpoint.",
    ),
    click.option(
        *("--tensor-model-parallel-size", "--tp", "tp"),
        type=_SIZE,
        default=1,
        show_default=True,
        help="Ranks that share each layer.",
    ),
    click.option(
        *("--pipeline-model-parallel-size", "--pp", "pp"),
        type=_SIZE,
        default=1,
        show_default=True,
        help="Groups of layers, on ranks of their own.",
    ),
    click.option(
        *("--expert-model-parallel-size", "--ep", "ep"),
        type=_SIZE,
        default=1,
        show_default=True,
        help="Ranks that share the experts.",
    ),
    click.option(
        "--nproc", type=_SIZE, help="Processes on this machine; as many as the sizes need by default."
    ),
    click.option("--lora-load", "lora", multiple=True, metavar="DIR", help="Folder of adapters; repeatable."),
    click.option("--platform", metavar="NAME", help="Platform cpu, cuda or npu; found out by default."),
    click.option(
        "--prefill-chunk",
        type=click.IntRange(0),
        default=0,
        help="Tokens of a prompt to compute at a time; all by default.",
    ),
    click.option(
        "--chat-template",
        metavar="NAME",
        help=f"Template of conversations: a file, or {_TEMPLATES}; by default the tokenizer's.",
    ),
    click.argument("flags", nargs=-1, type=click.UNPROCESSED),
)


@dataclass(frozen=True)
class ModelOptions:
    """A model to load.

    Attributes:
        load: its folder.
        tp: tensor-parallel size.
        pp: pipeline size.
        ep: expert-parallel size.
        lora: folders of adapters.
        platform: its name; None to find it out.
        prefill_chunk: tokens of a prompt at a time; 0 for all.
        chat_template: name or file; None for the tokenizer's.
        nproc: processes on this machine; None for as many as the sizes need.
        flags: further flags of the host.
    """

    load: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    lora: tuple[str, ...] = ()
    platform: str | None = None
    prefill_chunk: int = 0
    chat_template: str | None = None
    nproc: int | None = None
    flags: tuple[str, ...] = ()

    def open(self, batch_size: int = 8) -> LoadedModel:
        """Load the model on this rank; so many requests are computed together at most."""
        from mindspeed_megatron.quiet import quieten

        # Before anything imports megatron-core, which warns while it is imported.
        quieten()
        from mindspeed_models.inference import model

        return model.load(
            self.load,
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
            lora=self.lora,
            platform=self.platform,
            flags=self.flags,
            prefill_chunk=self.prefill_chunk,
            batch_size=batch_size,
            chat_template=self.chat_template,
        )

    def prompts(self, model: LoadedModel) -> Prompts:
        """Return the prompts of the loaded model."""
        from mindspeed_models.serving.prompts import load_prompts

        folder = getattr(model.run.args, "tokenizer_model", None) or self.load
        return load_prompts(model, folder, self.chat_template)

    def names(self, name: str | None) -> tuple[str, ...]:
        """Return how clients call the model, and its adapters."""
        adapters = tuple(Path(folder).resolve().name for folder in self.lora)
        return (name or Path(self.load).resolve().name or "model", *adapters)


class LayoutCommand(click.Command):
    """A command that starts itself in as many processes as its layout needs, where nothing else has.

    Attributes:
        rewrite: is applied to the command line first; None leaves it as it is.
    """

    rewrite: Callable[[Sequence[str]], list[str]] | None = None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remember the command line."""
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args if self.rewrite is None else self.rewrite(args))

    def invoke(self, ctx: click.Context) -> Any:
        """Run here, or in processes."""
        given = ctx.params
        world = given["nproc"] or given["tp"] * given["pp"] * given["ep"]
        if world == 1 or "RANK" in os.environ:
            return super().invoke(ctx)
        from mindspeed_train.interface import run_train_program

        assert self.name is not None
        return int(run_train_program(["--nproc", str(world), self.name, *ctx.meta[_WORDS]]))


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags to a function, which gets them as keywords."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def layout_command(
    name: str, short_help: str, rewrite: Callable[[Sequence[str]], list[str]] | None = None
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return the decorator of a command on a model: in one process or several, with flags of the host."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        settings = {"ignore_unknown_options": True, "max_content_width": 100}
        made = click.command(name, cls=LayoutCommand, short_help=short_help, context_settings=settings)
        command = made(function)
        command.rewrite = rewrite
        return parallel_command(command)

    return decorate


def model_of(given: dict[str, Any]) -> ModelOptions:
    """Take the model's flags out of the keywords of a command."""
    taken = {name: given.pop(name) for name in list(given) if name in ModelOptions.__dataclass_fields__}
    return ModelOptions(**{**taken, "lora": tuple(taken["lora"]), "flags": tuple(taken["flags"])})
