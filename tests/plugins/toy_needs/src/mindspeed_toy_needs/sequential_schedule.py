"""A pipeline schedule without pipelining: every forward pass, then every backward pass, stage by stage.

Slow, and easy to reason about: messages travel in one global order. Where the stages of the model live is
asked of the stage ``toy_route``, so that features can put them elsewhere.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor, forward_step

from mindspeed_megatron.backward_pass import backward_pass

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session

Route = tuple[tuple[int, int], ...]


class _Mail:
    """Tensors on their way between neighbouring stages, over the network or within the rank."""

    def __init__(self, route: Route, spec: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        self.route, self.spec, self.group, self.device = route, spec, group, device
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    def send(self, source: int, target: int, tensor: torch.Tensor) -> None:
        if self.route[source][0] == self.route[target][0]:
            self.kept[source, target] = tensor
        else:
            dist.send(tensor.contiguous(), group=self.group, group_dst=self.route[target][0])

    def receive(self, source: int, target: int) -> torch.Tensor:
        if (source, target) in self.kept:
            return self.kept.pop((source, target))
        tensor = torch.empty(self.spec.shape, dtype=self.spec.dtype, device=self.device)
        dist.recv(tensor, group=self.group, group_src=self.route[source][0])
        return tensor


def schedule(
    session: Session, args: Namespace, config: TransformerConfig, pg: ProcessGroupCollection
) -> Callable[..., Any]:
    """The schedule, with megatron-core's forward-backward signature."""
    group = pg.pp
    chunks = args.virtual_pipeline_model_parallel_size or 1
    route = session.call("toy_route", pp_size=group.size(), chunks=chunks)
    spec = session.call("boundary_schema", args=args, config=config).tensors[0]
    device = session.platform.device(args.local_rank)
    return partial(run_schedule, config=config, mail=_Mail(route, spec, group, device))


def run_schedule(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: list[Any],
    model: list[Any],
    num_microbatches: int,
    config: TransformerConfig,
    mail: _Mail,
    forward_only: bool = False,
    **_: Any,
) -> list[dict[str, torch.Tensor]]:
    """One batch; the reports of its micro-batches where the last stage is."""
    route, me = mail.route, mail.group.rank()
    last = len(route) - 1
    mine = [(stage, chunk) for stage, (rank, chunk) in enumerate(route) if rank == me]
    reports: list[dict[str, torch.Tensor]] = []
    done: list[tuple[int, Any, torch.Tensor]] = []
    total_tokens = torch.zeros([], dtype=torch.int, device=mail.device)
    for _microbatch in range(num_microbatches):
        for stage, chunk in mine:
            received = mail.receive(stage - 1, stage).requires_grad_() if stage else None
            output, tokens = forward_step(
                forward_step_func,
                data_iterator[chunk],
                model[chunk],
                num_microbatches,
                received,
                reports,
                config,
                config.context_parallel_size,
                is_last_stage=stage == last,
            )
            total_tokens += tokens
            if stage < last:
                mail.send(stage, stage + 1, output.detach())
            if not forward_only:
                deallocate_output_tensor(output, stage < last and config.deallocate_pipeline_outputs)
                done.append((stage, received, output))
    if forward_only:
        return reports
    for stage, received, output in reversed(done):
        gradient = mail.receive(stage + 1, stage) if stage < last else None
        gradient = backward_pass(received, output, gradient, config)
        if stage:
            mail.send(stage, stage - 1, gradient)
    config.finalize_model_grads_func(model, total_tokens if config.calculate_per_token_loss else None)
    return reports
