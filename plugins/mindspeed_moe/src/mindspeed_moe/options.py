"""The options of layers of experts, from the arguments of all active features; no torch."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from mindspeed_moe.comm_plans import Hops
from mindspeed_moe.expert_ranks import expert_ranks
from mindspeed_moe.plan_choice import chosen_hops

PAIRS = "moe-fb-overlap"
"""The feature under which the passes of two micro-batches take turns."""
OVERLAPS = ("moe-alltoall-overlap", "moe-allgather-overlap", PAIRS)
"""Features that compute while tokens travel."""
LAUNCHING = (
    *OVERLAPS,
    *("moe-async-comm", "moe-permute-fusion", "moe-comm-plan", "moe-zero-memory", "moe-adaptive-recompute"),
    *("moe-expert-placement", "moe-balanced-experts", "moe-experts-pipeline", "moe-mc2", "moe-ampipe"),
)
"""Features that need the layer of this package."""
ROWS, PLACES = "rows", "places"
"""Parts of the input that travel inside products of experts: as many rows as there are; padded places."""
DISABLED, LEVEL0, LEVEL1, ACTIVATION = "disable", "level0", "level1", "activation"
"""Activations of experts kept for backward: all; the first product's result; none; all but the activation
function's."""
JITTER, RESAMPLE = "Jitter", "RSample"
"""Noise of a router in training: on its input; on the scores that choose."""

HOT_GROUPS = "moe.hot-experts."
"""Begin of the names of process groups that carry copies of hot experts."""


@dataclass(frozen=True)
class DeviceLosses:
    """Losses of balance between the devices that hold experts.

    Attributes:
        balance: coefficient of the balance of what they compute.
        communication: coefficient of the balance of what they are sent.
        devices: how many there are; each holds as many experts, in their order.
        choices: experts of a token.
        reached: devices that a token may go to.
    """

    balance: float
    communication: float
    devices: int
    choices: int
    reached: int


@dataclass(frozen=True)
class GShard:
    """Routing with a capacity of experts.

    Attributes:
        factor: of the capacity, None where no token is dropped.
        padded: exchange equal parts; otherwise as many rows as there are.
        noise: `JITTER`, `RESAMPLE` or None.
        random_tokens: an expert with too many first choices keeps some at random instead of the first ones.
        sinkhorn: choose by balanced scores.
    """

    factor: float | None
    padded: bool = True
    noise: str | None = None
    random_tokens: bool = True
    sinkhorn: bool = False


@dataclass(frozen=True)
class LayerOptions:
    """Options of layers of experts: their routes, their communication, and the activations that they keep.

    Attributes:
        overlaps: shared experts and weight gradients are computed while tokens travel.
        saves: `DISABLED`, `LEVEL0` or `LEVEL1`.
        saving_layers: of each pipeline stage, so many layers save like that, the others their activation;
            None for all.
        crowded: times the mean of rows above which a call keeps less; None for never.
        launches: exchanges are launched in one place and waited for in another; otherwise the layer and its
            dispatcher stay megatron-core's.
        fuses: tokens are sorted by expert, and results brought back, by one kernel each.
        fixed_routes: tokens go to experts in turn.
        device_losses: of the router, None for none.
        hops: of the plan of communication, none for one exchange of all rows.
        pairs: before a layer waits, the pass of another micro-batch goes on.
        gshard: routing with a capacity of experts, None for megatron-core's.
        slices: experts travel one by one, their places in so many parts; None for all experts at once.
        apart: of pipelined experts, exchanges and gathers never run together.
        groups: experts that are cut over ranks are computed in so many groups; None for all at once.
        exchanges_inside: `ROWS` or `PLACES`, what travels inside products of experts; None for nothing.
        sliced: attention and experts of slices of the sequence run beside one another.
        gathers_apart: of slices, gathers of experts that are cut too.
        moves: experts move between ranks from step to step.
        hot_experts: so many at most are copied to all ranks for each micro-batch; 0 for none.
    """

    overlaps: bool
    saves: str = DISABLED
    saving_layers: int | None = None
    crowded: float | None = None
    launches: bool = True
    fuses: bool = False
    fixed_routes: bool = False
    device_losses: DeviceLosses | None = None
    hops: Hops = ()
    pairs: bool = False
    gshard: GShard | None = None
    slices: int | None = None
    apart: bool = False
    groups: int | None = None
    exchanges_inside: str | None = None
    sliced: bool = False
    gathers_apart: bool = False
    moves: bool = False
    hot_experts: int = 0

    @property
    def own_experts(self) -> bool:
        """True when experts keep for backward, or compute later, something else than megatron-core's."""
        return self.overlaps or self.saves != DISABLED or self.crowded is not None

    def of_layer(self, position: int, chunk: int, chunks: int) -> str:
        """Return what one layer keeps.

        Args:
            position: of the layer in its model chunk, from 0.
            chunk: virtual pipeline stage of the chunk.
            chunks: virtual pipeline stages of a rank.
        """
        if self.saves == DISABLED or self.saving_layers is None:
            return self.saves
        return self.saves if position * chunks + chunk < self.saving_layers else ACTIVATION


def layer_options(args: Any, active: Container[str]) -> LayerOptions:
    """Return the options of the active features, by name."""
    saves, crowded = "moe-zero-memory" in active, "moe-adaptive-recompute" in active
    gshard = gshard_options(args) if "moe-deepspeed" in active else None
    pipelined = "moe-pipe-experts" in active and items_of_layer(args) > 1
    slices = args.pipe_experts_multi_data if pipelined else None
    return LayerOptions(
        overlaps=any(name in active for name in OVERLAPS),
        saves=args.moe_zero_memory if saves else DISABLED,
        saving_layers=args.moe_zero_memory_num_layers if saves else None,
        crowded=args.moe_adaptive_recompute_activation_scale if crowded else None,
        launches=any(name in active for name in LAUNCHING)
        or slices is not None
        or (gshard is not None and gshard.padded),
        fuses="moe-permute-fusion" in active,
        fixed_routes="moe-fix-router" in active,
        device_losses=device_losses(args) if "moe-device-losses" in active else None,
        hops=chosen_hops(args) if "moe-comm-plan" in active else (),
        pairs=PAIRS in active,
        gshard=gshard,
        slices=slices,
        apart=slices is not None and args.pipe_experts_multi_stream,
        groups=args.moe_experts_pipeline_degree if "moe-experts-pipeline" in active else None,
        exchanges_inside=(ROWS if args.moe_alltoall_mc2 else PLACES) if "moe-mc2" in active else None,
        sliced="moe-ampipe" in active,
        gathers_apart="moe-ampipe" in active and args.ampipe_tp_sp_comm_overlap,
        moves="moe-expert-placement" in active,
        hot_experts=args.balanced_moe_hot_expert_num if "moe-balanced-experts" in active else 0,
    )


def items_of_layer(args: Any) -> int:
    """Return how many parts the rows of a layer's experts travel in, where they are pipelined."""
    return int((args.num_experts or 1) // expert_ranks(args) * args.pipe_experts_multi_data)


def has_places(args: Any) -> bool:
    """Return whether experts have equally many places for the tokens of each rank, as DeepSpeed's have."""
    return getattr(args, "moe_model_type", None) == "deepspeed_moe" and (
        not getattr(args, "moe_no_drop", False) or getattr(args, "moe_dynamic_padding", False)
    )


def gshard_options(args: Any) -> GShard:
    """Return the routing that arguments ask for."""
    drops = not args.moe_no_drop
    return GShard(
        factor=args.moe_train_capacity_factor if drops else None,
        padded=drops or args.moe_dynamic_padding,
        noise=_noise(args),
        random_tokens=args.use_rts,
        sinkhorn=args.moe_use_sinkhorn,
    )


def _noise(args: Any) -> str | None:
    """Return the noise of the router; `RESAMPLE` is for one choice, and two are made without any."""
    without = {None, "None"} | ({RESAMPLE} if getattr(args, "moe_router_topk", None) == 2 else set())
    return None if args.noisy_gate_policy in without else args.noisy_gate_policy


def device_losses(args: Any) -> DeviceLosses:
    """Return the losses of balance between devices that arguments ask for."""
    devices, choices = number_of_devices(args), args.moe_router_topk
    return DeviceLosses(
        balance=args.moe_device_level_aux_loss_coeff,
        communication=args.moe_comm_aux_loss_coeff,
        devices=devices,
        choices=choices,
        reached=getattr(args, "moe_router_group_topk", None) or min(choices, devices),
    )


def number_of_devices(args: Any) -> int:
    """Return the groups of experts of the router, or else the ranks that experts are spread over."""
    groups = getattr(args, "moe_router_num_groups", None)
    return int(groups or expert_ranks(args))


def without_pairs(stages: int) -> str:
    """Return the refusal of a pipeline of so many stages whose passes depend on one another."""
    return (
        f"--moe-fb-overlap with --pipeline-model-parallel-size {stages} and one model chunk per rank has no "
        "forward and backward pass to run side by side; use 1, virtual stages "
        "(--num-layers-per-virtual-pipeline-stage), or --schedules-method dualpipev of mindspeed-pp"
    )
