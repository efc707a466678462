"""State of distributed optimizers, gathered by megatron-core and in slices; runs in worlds."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed_core.activation import activate
from mindspeed_megatron.instruments.communication import count_communication
from mindspeed_testing.model_flags import training_flags
from mindspeed_tp.gathered_state import KEYS, slices
from mindspeed_train import loop

SIZE = 1000


def _flat(state: Any) -> dict[str, torch.Tensor]:
    # One buffer, of one dtype.
    tensors = {} if state is None else next(iter(state[0].values()))
    return {key: tensors[key] for key in KEYS if key in tensors}


def _own(part: Any) -> list[torch.Tensor]:
    return [
        tensor.detach().clone()
        for parameter in part.model_param_group_index_map
        for key, tensor in sorted(part._get_main_param_and_optimizer_states(parameter).items())
        if key != "step"
    ]


def gathered(flags: tuple[str, ...]) -> dict[str, Any]:
    """Train two steps, gather both ways, spoil the state and hand it out again."""
    line = training_flags(("--use-distributed-optimizer", "--hccl-slice-size", str(SIZE), *flags), 2)
    with activate(line, host="standalone") as session:
        run = loop.setup(session)
        for _ in range(2):
            session.call("train_step", run=run)
        (part,) = getattr(run.optimizer, "chained_optimizers", [run.optimizer])
        theirs = _flat(type(part).get_parameter_state_dp_zero(part, use_gloo_comm=False))
        with count_communication() as log:
            state = part.get_parameter_state_dp_zero()
        ours, before = _flat(state), _own(part)
        everywhere = _flat(part.get_parameter_state_dp_zero(return_on_all_ranks=True))
        for parameter in part.model_param_group_index_map:
            for tensor in part._get_main_param_and_optimizer_states(parameter).values():
                if tensor.dim():
                    tensor.detach().zero_()
        with count_communication() as handed:
            part.load_parameter_state_from_dp_zero(state)
        ranks = part.data_parallel_group.size()
        buckets = [bucket.grad_data.numel() // ranks for buffer in part.buffers for bucket in buffer.buckets]
        result = {
            "alike": all(torch.equal(theirs[key], ours[key]) for key in theirs),
            "kept": sorted(ours),
            "everywhere": sum(tensor.abs().sum().item() for tensor in everywhere.values()),
            "restored": all(torch.equal(one, other) for one, other in zip(before, _own(part), strict=True)),
            "gathers": len(log.select("gather")),
            "scatters": len(handed.select("scatter")),
            "formula": sum(3 * slices(local, SIZE) for local in buckets),
            "buckets": len(buckets),
            "gloo": part.data_parallel_group_gloo is not None,
        }
        loop.teardown(session)
    return result
