"""The parameters that train beside a frozen base, and the gradient's way to them.

With a frozen embedding the input of the first layer needs no gradient, and layers that are recomputed as a
whole then give none to anything in them: without a message, losses stay what they were. So outputs of a
frozen embedding ask for a gradient, and the first update looks whether one arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_core.errors import UserError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.unwrap import unwrap
from mindspeed_models.lora.options import HOOKS, NAME, SAVED, A, B

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, by its name in a chunk."""
    return name.rpartition(".")[2] in (A, B)


def freeze(session: Session, chunks: Sequence[Any], modules: Sequence[str], *, in_fp32: bool) -> None:
    """Leave the adapters of built chunks to train, and what is named beside them; everything else stays.

    Args:
        session: counts what is trained.
        chunks: of this rank, not wrapped for data parallelism yet.
        modules: parts of the paths of parameters that train as well.
        in_fp32: adapters are float32, whatever the model was cast to.

    Raises:
        UserError: no parameter of any rank belongs to one of the modules.
    """
    found: set[str] = set()
    count = 0
    for chunk in chunks:
        model = unwrap(chunk)
        tied = bool(getattr(model, "share_embeddings_and_output_weights", False))
        for name, parameter in model.named_parameters():
            trained = is_adapter(name)
            parts = name.split(".")
            for module in modules:
                if module in parts or (tied and {module, *parts} >= {"word_embeddings", "output_layer"}):
                    trained = True
                    found.add(module)
            parameter.requires_grad_(trained)
            if trained and in_fp32 and is_adapter(name):
                parameter.data = parameter.data.float()
            count += trained
    session.place(NAME, count)
    missing = set(modules).difference(*all_gather_values(found)) if modules else set()
    if missing:
        raise UserError(f"{SAVED} {' '.join(sorted(missing))}: this model has no such module; drop the name")


def let_inputs_learn(chunks: Sequence[Any], modules: Iterable[str] = ()) -> None:
    """Let outputs of frozen embeddings ask for a gradient, so that recomputed layers learn.

    Args:
        chunks: of this rank.
        modules: names of further modules whose outputs do.
    """
    # An output of the embedding asks for all that follows it; further up, its gradient would only travel.
    named = set(modules) - {"embedding", "word_embeddings", "input_layernorm"}
    for chunk in chunks:
        model = unwrap(chunk)
        embedding = getattr(model, "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(_ask_for_gradient)
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in named and module is not embedding:
                module.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(module: Any, inputs: Any, output: Any) -> None:
    if (
        module.training
        and torch.is_grad_enabled()
        and isinstance(output, torch.Tensor)
        and output.is_floating_point()
        and not output.requires_grad
    ):
        output.requires_grad_(True)


def check_gradients(run: Run) -> None:
    """Refuse to go on where no adapter of a pipeline stage has got a gradient; collective, before an update.

    Raises:
        UserError: says what may be the cause.
    """
    mine: list[tuple[tuple[int, int], bool]] = []
    for index, chunk in enumerate(run.model):
        ups = [parameter for name, parameter in unwrap(chunk).named_parameters() if name.endswith(f".{B}")]
        if ups:
            # A dry run has no values to look at.
            learned = run.session.platform.dry_run or any(
                bool(gradient.ne(0).any()) for gradient in map(_gradient, ups) if gradient is not None
            )
            mine.append(((run.pg.pp.rank(), index), learned))
    everywhere = [entry for part in all_gather_values(mine) for entry in part]
    places = sorted({place for place, _ in everywhere})
    dead = [place for place in places if not any(ok for where, ok in everywhere if where == place)]
    if dead:
        stages = ", ".join(sorted({str(stage) for stage, _ in dead}))
        where = "no adapter" if len(dead) == len(places) else f"no adapter of pipeline stage {stages}"
        raise UserError(
            f"{NAME}: {where} got a gradient in the first step, so nothing would be learned there. Either no "
            "token of the batch counts in the loss, or something between loss and adapters stops "
            f"gradients: a layer that is recomputed and whose input needs none ({HOOKS} names modules "
            "whose outputs ask "
            "for one), or a module that runs without gradient"
        )


def _gradient(parameter: Any) -> torch.Tensor | None:
    elsewhere = getattr(parameter, "canonical_grad", None)
    if elsewhere is not None:
        found: torch.Tensor = elsewhere()
        return found
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def trained_elements(chunks: Iterable[Any]) -> int:
    """Return the number of elements that train on this rank."""
    return sum(p.numel() for chunk in chunks for p in chunk.parameters() if p.requires_grad)


def trained_names(chunk: Any) -> frozenset[str]:
    """Return the names of the parameters of a chunk that train, as its ``state_dict`` has them."""
    named: Iterator[tuple[str, Any]] = unwrap(chunk).named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if parameter.requires_grad)
