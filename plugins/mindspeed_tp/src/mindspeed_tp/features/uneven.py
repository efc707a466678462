"""The declaration of tensor parallelism of dimensions that the ranks do not divide."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, hookimpl
from mindspeed_tp.features.core import PLANNED
from mindspeed_tp.features.formulas import UNEVEN as UNEVEN_BYTES
from mindspeed_tp.options import GRID, MC2, UNEVEN

if TYPE_CHECKING:
    from mindspeed_tp.uneven.cut import Cuts

_FLAG = "--unaligned-linear"


class UnevenLinears(Feature):
    """Heads, query groups, widths and lengths need not divide by the tensor-parallel size."""

    name = UNEVEN
    family = "tp"
    summary = "Allow heads, widths and sequence lengths that TP does not divide"
    flags = (Flag(_FLAG, help="Allow heads, widths and sequence lengths that the ranks do not divide."),)
    requires = (PLANNED,)
    conflicts = (
        Conflict(feature=MC2, reason="its kernels take equal parts; use --use-ascend-coc"),
        Conflict(feature=GRID, reason="a grid divides every dimension; drop one of the two"),
        Conflict(flag="--num-experts", reason="experts are distributed evenly; drop one of the two"),
        Conflict(
            flag="--multi-latent-attention",
            reason="its down-projections are whole on every rank; drop one of the two",
        ),
        Conflict(flag="--mtp-num-layers", reason="predictions scatter sequences evenly; drop one of the two"),
        Conflict(
            flag="--position-embedding-type", equals="alibi", reason="slopes go by equal numbers of heads"
        ),
        Conflict(
            flag="--softmax-type",
            equals="learnable",
            reason="its offsets are saved for equal numbers of heads",
        ),
        Conflict(flag="--use-torch-fsdp2", reason="it shards weights of equal sizes; drop one of the two"),
        Conflict(flag="--use-megatron-fsdp", reason="it shards weights of equal sizes; drop one of the two"),
    )
    slots = ("tp-partition",)
    hosts = ("standalone", "megatron-lm")
    docs = "mindspeed_tp:docs/unaligned-linear.md"
    modes = ("train",)
    places_modules = True
    needs_open_session = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {"bytes_sent": UNEVEN_BYTES}
    verify = Proofs("mindspeed_tp.features.uneven_proofs:UNEVEN_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse ranks without a part, and layouts whose parts are equal by definition."""
        found = []
        t, cp = args.tensor_model_parallel_size, getattr(args, "context_parallel_size", 1)
        if cp > 1:
            found.append(
                f"{_FLAG} with --context-parallel-size {cp}: its ranks exchange equal parts; drop one"
            )
        cuts = _cuts(args)
        for load, parts in cuts.loads:
            if not parts.sizes[-1]:
                found.append(
                    f"{_FLAG}: {parts.total} {load} leave some of {t} ranks without any; lower "
                    "--tensor-model-parallel-size"
                )
        if (
            cuts.sequence is not None
            and not cuts.sequence.even
            and args.position_embedding_type not in ("rope", "none")
        ):
            found.append(
                f"{_FLAG} with --seq-length {args.seq_length} and --sequence-parallel: learned positions are "
                f"scattered evenly over {t} ranks; use --position-embedding-type rope, or a multiple of {t}"
            )
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say how unequal the loads are."""
        t = args.tensor_model_parallel_size
        uneven = [(load, parts) for load, parts in _cuts(args).loads if not parts.even]
        return [f"{parts.total} {load} on {t} ranks: {100 * parts.idle:.0f} % idle" for load, parts in uneven]

    @hookimpl(wrapper=True)
    def validate_arguments(self, args: Any) -> Generator[None, Any, Any]:
        """Pad the vocabulary to a multiple of the ranks, which the host leaves to this feature."""
        args = yield
        padded, t = getattr(args, "padded_vocab_size", None), args.tensor_model_parallel_size
        if padded is not None:
            args.padded_vocab_size = -(-padded // t) * t
        return args

    @hookimpl(wrapper=True)
    def build_process_groups(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Create the groups of one rank for which megatron-core counts heads."""
        groups = yield
        from mindspeed_tp.uneven.linears import ALONE, TOGETHER

        t = args.tensor_model_parallel_size
        session.groups.split(ALONE, groups.tp, [[rank] for rank in range(t)])
        session.groups.split(TOGETHER, groups.tp, [list(range(t))])
        return groups

    @hookimpl(wrapper=True)
    def build_transformer_config(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Let interleaved stages tell each other how long their parts are."""
        config = yield
        from mindspeed_megatron.schedule import interleaves_natively

        cut = _cuts(args).sequence
        if interleaves_natively(session, args) and cut is not None and not cut.even:
            config.variable_seq_lengths = True
        return config

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Place attention and layers."""
        spec = yield
        from mindspeed_tp.uneven.placement import place_uneven

        return place_uneven(session, spec, _cuts(args))

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change embedding, angles and output layer where positions are distributed unevenly."""
        model = yield
        from mindspeed_tp.uneven.placement import change_ends

        change_ends(session, model, _cuts(args))
        return model

    @hookimpl(wrapper=True)
    def boundary_schema(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Describe this rank's positions; both sides of a boundary have as many."""
        schema = yield
        cut = _cuts(args).sequence
        if cut is None or cut.even:
            return schema
        from mindspeed_tp.uneven.linears import TOGETHER

        first, *others = schema.tensors
        own = cut.sizes[session.groups[TOGETHER].rank()]
        return replace(schema, tensors=(replace(first, shape=(own, *first.shape[1:])), *others))


def _cuts(args: Any) -> Cuts:
    """Return how the arguments cut heads, rows and sequences."""
    from mindspeed_tp.uneven.cut import Cuts

    return Cuts.of(args)
