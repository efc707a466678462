"""Update rules of others inside megatron-core's optimizers.

megatron-core's optimizers hold gradients, float32 copies and shards; the update itself is done by an inner
optimizer, which is Adam or SGD there. Here another takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from mindspeed_core.errors import CheckpointError, SessionError, UserError
from mindspeed_megatron import main_parameters
from mindspeed_megatron.described_optimizer import MOMENTS, DescribedOptimizer
from mindspeed_megatron.main_parameters import MainParameterOptimizer
from mindspeed_megatron.parameter_parts import parts_of

if TYPE_CHECKING:
    from mindspeed_core.session import Session

Inner = TypeVar("Inner", bound=DescribedOptimizer)
_HOSTED = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)


def put_inside(
    session: Session,
    optimizer: Any,
    make: Callable[[list[dict[str, Any]]], Inner],
    *,
    owner: str,
    model: Iterable[Any] = (),
    pg: Any = None,
) -> list[Inner]:
    """Put optimizers of another kind in the place of those inside a megatron-core optimizer.

    Groups of parameters, float32 copies of 16-bit parameters and the way into checkpoints stay. Closing the
    session puts the former ones back, without the state. A `MainParameterOptimizer` takes the copies over;
    what is put back then refuses to step.

    Args:
        session: the session.
        optimizer: what the stage ``build_optimizer`` returned.
        make: from groups of parameters to the optimizer, for instance the class; called once per optimizer
            that megatron-core chains. Not called on a rank whose pipeline stage trains nothing.
        owner: the feature's name.
        model: what the stage got; a rule finds the names of parameters in its parts then.
        pg: what the stage got; a rule finds tensor-parallel groups in its parts then.

    Returns:
        The new ones.

    Raises:
        UserError: megatron-core keeps parameters or state where no other optimizer finds them.
        SessionError: the optimizer has state already.
    """
    chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    hosting = [part for part in chained if not getattr(part, "is_stub_optimizer", False)]
    for part in hosting:
        _check(part, owner)
    found: list[Inner] = []
    chunks = list(model)
    for part in hosting:
        former = part.optimizer
        inner = make(former.param_groups)
        changes = {"optimizer": inner, "init_state_fn": lambda inner, config=None: inner.allocate()}
        if isinstance(part, DistributedOptimizer):
            inner.state_apart = True
            if not part.ddp_config.use_megatron_fsdp:
                changes |= _of_buffers(part, inner)
        for attribute, value in changes.items():
            session.instances.set(owner, part, attribute, value)
        if isinstance(inner, MainParameterOptimizer) and main_parameters.holds_16_bit_parameters(part):
            _hand_over(session, part, inner, former, owner)
        inner.parts = parts_of(part, inner.param_groups, chunks, pg)
        found.append(inner)
    keeping = [inner for inner in found if isinstance(inner, MainParameterOptimizer)]
    if keeping and hosting[0].config.bf16 | hosting[0].config.fp16:
        for instance, attribute, value in main_parameters.clipping_changes(optimizer, keeping):
            session.instances.set(owner, instance, attribute, value)
    return found


def _hand_over(session: Session, part: Any, inner: MainParameterOptimizer, former: Any, owner: str) -> None:
    """Let an inner optimizer keep the main parameters of 16-bit parameters itself."""
    for parameter, copy in main_parameters.hand_over(part):
        inner.adopt_main_parameter(parameter, copy)
    for instance, attribute, value in main_parameters.changes(part, inner):
        session.instances.set(owner, instance, attribute, value)

    def step(closure: Any = None) -> None:
        raise SessionError(
            f"{owner}: the main parameters were kept by an optimizer of a session that is closed; build the "
            "optimizer again"
        )

    session.at_close(lambda: setattr(former, "step", step))


def _check(part: Any, owner: str) -> None:
    kind = type(part).__name__
    if not isinstance(part, _HOSTED):
        raise UserError(f"{owner}: no other optimizer can be put inside a {kind} of megatron-core")
    for field in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if getattr(part.config, field, False):
            option = f"--{field.replace('_', '-')}"
            raise UserError(
                f"{owner}: with {option} the state lies inside Adam's own kernels; drop {option} or {owner}"
            )
    if any(part.optimizer.state.values()):
        raise SessionError(f"{owner}: the {kind} has state; its optimizer is replaced before it has any")


def _of_buffers(part: DistributedOptimizer, inner: DescribedOptimizer) -> dict[str, Any]:
    """Return the methods by which a distributed optimizer reaches the state of a parameter's part."""
    standing_in: dict[str, str] = {}

    def updated(model_param: torch.Tensor) -> torch.Tensor:
        group, order = part.model_param_group_index_map[model_param]
        parameter: torch.Tensor = inner.param_groups[group]["params"][order]
        return parameter

    def main_value(parameter: torch.Tensor) -> torch.Tensor:
        return inner.main_parameter(parameter) if isinstance(inner, MainParameterOptimizer) else parameter

    def get(model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        parameter = updated(model_param)
        tensors = {"param": main_value(parameter), **inner.described(parameter)}
        return {name: tensors[other] for name, other in standing_in.items()} or tensors

    @torch.no_grad()
    def put(model_param: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        parameter = updated(model_param)
        if isinstance(inner, MainParameterOptimizer):
            inner.take_main_parameter(parameter, tensors["param"])
        else:
            parameter.copy_(tensors["param"])
        inner.take(parameter, tensors)

    methods: dict[str, Any] = {
        "_get_main_param_and_optimizer_states": get,
        "_set_main_param_and_optimizer_states": put,
    }
    if not inner.further:
        return methods
    gathered = part.get_parameter_state_dp_zero

    def gather(*args: Any, **named: Any) -> Any:
        """Gather three kinds of tensors at a time, which is what megatron-core's method does."""
        state = gathered(*args, **named)
        places = ("param", *MOMENTS)
        for start in range(0, len(inner.further), len(places)):
            names = inner.further[start : start + len(places)]
            # Places beyond the last name hold it once more.
            standing_in.update(dict.fromkeys(places, names[-1]) | dict(zip(places, names)))
            try:
                more = gathered(*args, **named)
            finally:
                standing_in.clear()
            for index in [key for key in state or () if isinstance(key, int)]:
                for dtype, tensors in state[index].items():
                    tensors.update({name: more[index][dtype][place] for place, name in zip(places, names)})
        return state

    methods["get_parameter_state_dp_zero"] = gather
    for method in ("save_parameter_state", "sharded_param_state_dp_zero"):
        methods[method] = partial(_refuse_format, type(inner).__name__, inner.further)
    return methods


def _refuse_format(kind: str, further: tuple[str, ...], *unused: Any, **options: Any) -> None:
    raise CheckpointError(
        f"{kind} keeps {', '.join(further)}, for which this format of checkpoints has no place; use "
        "--ckpt-format torch_dist with --dist-ckpt-optim-fully-reshardable"
    )
