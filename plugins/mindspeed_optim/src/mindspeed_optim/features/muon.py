"""The declaration of Muon."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, hookimpl
from mindspeed_optim.muon.options import (
    BLOCKWISE,
    DUPLICATED,
    PRECISIONS,
    SCALAR_OPTIMIZERS,
    SCALE_MODES,
    SETS,
    TP_MODES,
    muon_options,
)

if TYPE_CHECKING:
    from argparse import Namespace

    from mindspeed_core.session import Session

MUON, DIST_MUON = "muon", "dist_muon"
"""Values of ``--optimizer``; the second one switches ``--use-distributed-optimizer`` on."""
_SHARDED = "it cuts matrices by rows, and their parts do not meet there; use --use-distributed-optimizer"
_ELSEWHERE = "the state lies inside Adam's own kernels"
_UNEVEN = "tensor-parallel ranks must share matrices in equal parts"


class MuonOptimizer(Feature):
    """Orthogonalizes the momentum of matrices, on the ordinary distributed optimizer."""

    name = "opt-muon"
    family = "optim"
    summary = "Update matrices by their orthogonalized momentum (Muon), others by Adam"
    flags = (
        Flag(
            "--optimizer",
            type=str,
            default="adam",
            choices=(MUON, DIST_MUON),
            help="muon: orthogonalized momentum; dist_muon: the same with --use-distributed-optimizer.",
        ),
        Flag("--muon-momentum", type=float, help="Weight of the old momentum in the new."),
        Flag("--muon-no-split-qkv", inverts="muon_split_qkv", help="Orthogonalize q, k and v together."),
        Flag(
            "--muon-use-nesterov",
            aliases=("--muon-nesterov",),
            help="Look ahead: add the gradient's own share to the momentum once more.",
        ),
        Flag("--muon-scale-mode", type=str, choices=SCALE_MODES, help="Size of the update by shape."),
        Flag(
            "--muon-fp32-matmul-prec",
            type=str,
            choices=PRECISIONS,
            help="low, medium: products of bfloat16; high: of float32, in TF32 where there is one.",
        ),
        Flag(
            "--muon-coefficient-type",
            type=str,
            default="quintic",
            choices=tuple(SETS),
            help="Coefficients of the iteration.",
        ),
        Flag("--muon-num-ns-steps", type=int, help="Steps of the iteration."),
        Flag(
            "--muon-tp-mode",
            type=str,
            choices=TP_MODES,
            help="blockwise: each rank its own part, so that results depend on the tensor-parallel size.",
        ),
        Flag("--muon-extra-scale-factor", type=float, help="Further factor of the update."),
        Flag(
            "--muon-scalar-optimizer",
            type=str,
            default="adam",
            choices=SCALAR_OPTIMIZERS,
            help="Rule for embeddings, the output layer, norms and biases.",
        ),
        Flag("--lion-beta1", type=float, default=0.95, help="Of Lion: momentum's share in the direction."),
        Flag("--lion-beta2", type=float, default=0.98, help="Of Lion: decay of the momentum."),
        Flag("--muon-split-gated", help="Orthogonalize gate and up projection of gated layers apart."),
    )
    conflicts = (
        Conflict(flag="--fp16", reason="skipped steps and scaled gradients are not proven; use --bf16"),
        Conflict(flag="--use-torch-fsdp2", reason=_SHARDED),
        Conflict(flag="--use-megatron-fsdp", reason=_SHARDED),
        Conflict(flag="--use-precision-aware-optimizer", reason=_ELSEWHERE),
        Conflict(flag="--optimizer-cpu-offload", reason="the update is made on the host by its own Adam"),
        Conflict(
            flag="--overlap-param-gather-with-optimizer-step",
            reason="it updates one chunk of the model while others wait, and matrices meet in one step",
        ),
        Conflict(feature="unaligned-linear", reason=_UNEVEN),
        Conflict(feature="tp-2d", reason="a grid of ranks cuts matrices in both dimensions"),
        Conflict(
            feature="pp-chimera", reason="copies of a pipeline stage share shards in an order of their own"
        ),
        Conflict(
            feature="moe-expert-placement",
            reason="experts that move take both moments of Adam along",
        ),
    )
    slots = ("optimizer",)
    modes = ("train",)
    docs = "mindspeed_optim:docs/opt-muon.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_optim.features.muon_proofs:MUON_PROOFS")

    @classmethod
    def presets(cls, args: Namespace) -> Mapping[str, Any]:
        """Shard where the name of the rule says so."""
        sharding = args.optimizer == DIST_MUON and hasattr(args, "use_distributed_optimizer")
        return {"use_distributed_optimizer": True} if sharding else {}

    @classmethod
    def validate(cls, args: Namespace) -> Sequence[str]:
        """Refuse what the rule cannot compute."""
        try:
            options = muon_options(args)
        except ValueError as error:
            return (str(error),)
        problems = []
        if not 0.0 <= options.momentum < 1.0:
            problems.append(f"--muon-momentum {options.momentum}: it is at least 0 and below 1")
        for flag, beta in zip(("--lion-beta1", "--lion-beta2"), options.lion_betas):
            if not 0.0 <= beta < 1.0:
                problems.append(f"{flag} {beta}: it is at least 0 and below 1")
        if options.extra_scale <= 0.0:
            problems.append(f"--muon-extra-scale-factor {options.extra_scale}: it is above 0")
        if getattr(args, "num_distributed_optimizer_instances", 1) > 1:
            problems.append(
                f"--optimizer {args.optimizer} with --num-distributed-optimizer-instances "
                f"{args.num_distributed_optimizer_instances}: shards of a matrix meet within one instance; "
                "leave it at 1"
            )
        grouped = getattr(args, "group_query_attention", True)
        groups = getattr(args, "num_query_groups" if grouped else "num_attention_heads", None)
        few = bool(groups) and groups < args.tensor_model_parallel_size
        if few and options.split_qkv and options.tp_mode != DUPLICATED:
            problems.append(
                f"--muon-tp-mode {options.tp_mode} splits q, k and v on each of "
                f"{args.tensor_model_parallel_size} tensor-parallel ranks, which share {groups} groups of "
                "heads; use --muon-tp-mode duplicated, or --muon-no-split-qkv"
            )
        return problems

    @classmethod
    def notes(cls, args: Namespace) -> Sequence[str]:
        """Say what depends on the layout."""
        if args.tensor_model_parallel_size == 1 or muon_options(args).tp_mode != BLOCKWISE:
            return ()
        return (
            f"--muon-tp-mode {BLOCKWISE} orthogonalizes each tensor-parallel rank's part of a matrix by "
            "itself: another --tensor-model-parallel-size trains another model; duplicated and distributed "
            "do not depend on it",
        )

    @hookimpl(wrapper=True)
    def build_optimizer(
        self, session: Session, args: Namespace, optimizer_config: Any, model: Any, pg: Any
    ) -> Generator[None, Any, Any]:
        """Put Muon where Adam was."""
        optimizer = yield
        from mindspeed_core import put_inside
        from mindspeed_optim.muon.matrices import Matrices
        from mindspeed_optim.rules.muon import Muon

        options = muon_options(args)
        matrices = Matrices(model, options)
        decoupled = getattr(optimizer_config, "decoupled_weight_decay", True)
        put_inside(
            session,
            optimizer,
            lambda groups: Muon(groups, options, matrices, decoupled=decoupled),
            owner=self.name,
            model=model,
            pg=pg,
        )
        return optimizer
