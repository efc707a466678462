"""Origin of a loss or gradient that is not finite: a weight, the output of a module, or a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.fully_sharded.torch_fsdp2 import local_part
from mindspeed_megatron.padding import padding_options
from mindspeed_megatron.unwrap import unwrap
from mindspeed_train.checkpoint import rng_state

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_core.run import Batch, Run


def bad_gradient(run: Run) -> str:
    """Name the first parameter of this rank whose gradient is not finite."""
    for name, parameter in parameters(run):
        gradient = getattr(parameter, "main_grad", None)
        gradient = local_part(parameter.grad if gradient is None else gradient)
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            return f"the gradient of {name} {_describe(gradient)}"
    return "a gradient is not finite"


def _bad_weight(run: Run) -> str:
    """Say which weight of this rank is not finite; empty where all are."""
    for name, parameter in parameters(run):
        weight = local_part(parameter)
        if not bool(torch.isfinite(weight).all()):
            return f"the weight {name} {_describe(weight)}: an earlier update spoiled it"
    return ""


def origin_of_loss(run: Run, batch: Batch, model_chunk: MegatronModule) -> str:
    """Say where a loss that is not finite comes from: a weight, or the first module that made it.

    Runs the micro-batch forward again, with a look at the output of every module. Where ranks with other
    data would have to take part (expert or context parallelism), only weights are looked at.
    """
    # The loss is that of all tensor-parallel ranks: where one of them has found a weight, none runs it again.
    found_by = all_gather_values(_bad_weight(run), run.pg.tp)
    for rank, text in enumerate(found_by):
        if text:
            return text if len(found_by) == 1 else f"on tensor-parallel rank {rank}, {text}"
    if fully_sharded(run):
        return "this rank's parts of all weights are finite"
    if run.pg.cp.size() > 1 or (getattr(run.pg, "ep", None) is not None and run.pg.ep.size() > 1):
        return "all weights are finite"
    chunk = unwrap(model_chunk)
    found: list[str] = []

    def look(name: str, module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not found and all(_finite(item) for item in inputs) and not _finite(output):
            found.append(
                f"the first bad tensor is the output of {name or 'the model'} ({type(module).__name__})"
            )

    handles = [
        module.register_forward_hook(
            lambda module, inputs, output, name=name: look(name, module, inputs, output)
        )
        for name, module in chunk.named_modules()
    ]
    states = rng_state.capture(run.session.platform)
    training = chunk.training
    chunk.eval()
    try:
        options = padding_options(run, batch, chunk)
        if batch.packed_seq_params is not None:
            options["packed_seq_params"] = batch.packed_seq_params
        with torch.no_grad():
            chunk(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels, **options)
    finally:
        chunk.train(training)
        rng_state.apply(states, run.session.platform)
        for handle in handles:
            handle.remove()
    if found:
        return found[0]
    if run.pg.pp.size() > 1:
        return "it is bad already where it arrives from an earlier pipeline stage"
    return "all weights and all modules' outputs are finite when the micro-batch is repeated without dropout"


def parameters(run: Run) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of this rank by name."""
    for chunk in run.model:
        yield from unwrap(chunk).named_parameters()


def fully_sharded(run: Run) -> bool:
    """Return whether this rank holds parts of parameters only."""
    return bool(run.args.use_torch_fsdp2 or run.args.use_megatron_fsdp)


def _finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value).all())
    if isinstance(value, (tuple, list)):
        return all(_finite(item) for item in value)
    return True


def _describe(tensor: torch.Tensor) -> str:
    bad = int((~torch.isfinite(tensor)).sum())
    kind = "nan" if bool(torch.isnan(tensor).any()) else "inf"
    return f"holds {kind} in {bad} of {tensor.numel()} elements"


def guard(look: Callable[[], str]) -> str:
    """Return what was found; an error while looking must not hide what went wrong in the run."""
    try:
        return look()
    except Exception as error:
        return f"its origin could not be found ({type(error).__name__}: {error})"
