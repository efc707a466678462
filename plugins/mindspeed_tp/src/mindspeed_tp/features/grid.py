"""The declarations of two-dimensional tensor parallelism and of its former spelling."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspeed_core.feature import Conflict, Fallback, Feature, Flag, Proofs, dest_of, hookimpl
from mindspeed_tp.features.core import PLANNED
from mindspeed_tp.features.formulas import GRID as GRID_BYTES
from mindspeed_tp.options import GRID

_FLAG, _FORMER = "--tp-2d", "--use-nd-matmul"
_AG, _RS = "--enable-overlap-ag-with-matmul", "--enable-overlap-matmul-with-rs"
_BACKWARD_AG = "--enable-backward-overlap-ag-with-matmul"
_ND1, _ND2 = "--nd1-dim1-size", "--nd2-dim1-size"


class TwoDimensional(Feature):
    """Weights are cut in both dimensions over a grid of ranks."""

    name = GRID
    family = "tp"
    summary = "Shard every weight over a 2D grid of ranks: less communication on many ranks"
    stability = "prototype"
    flags = (
        Flag(_FLAG, help="Shard weights in both dimensions over --tp-x times --tp-y ranks."),
        Flag("--tp-x", type=int, default=1, help="Ranks that hold different rows of the hidden state."),
        Flag("--tp-y", type=int, default=1, help="Ranks that hold different features of the hidden state."),
        Flag(_AG, help="Overlap the ring all-gather of --tp-y with the GEMMs of row-parallel linear layers."),
        Flag(_RS, help="Overlap the reduce-scatter with the GEMMs of column-parallel linear layers."),
        Flag(_BACKWARD_AG, help="Overlap the ring all-gather of gradients with GEMMs in backward."),
        Flag(_FORMER, help=f"Former spelling of {_FLAG}."),
        Flag(_ND1, type=int, default=1, help=f"With {_FORMER}: the --tp-x of {_FLAG}."),
        Flag(_ND2, type=int, default=1, help=f"With {_FORMER}: ranks in the other direction."),
    )
    before = ("flash-attn", "fusion-attn-v2", "context-parallel")
    requires = (PLANNED,)
    conflicts = (
        Conflict(flag="--num-experts", reason="experts are not cut in two dimensions; drop one of the two"),
        Conflict(
            flag="--multi-latent-attention",
            reason="its down-projections are whole on every rank; drop one of the two",
        ),
        Conflict(flag="--mtp-num-layers", reason="predictions begin with hidden states that are whole"),
        Conflict(flag="--use-torch-fsdp2", reason="it shards whole weights; drop one of the two"),
        Conflict(flag="--use-megatron-fsdp", reason="it shards whole weights; drop one of the two"),
        Conflict(flag="--fp32-residual-connection", reason="its sum is placed where dropout is drawn"),
        Conflict(flag="--position-embedding-type", equals="alibi", reason="slopes go by heads in rank order"),
        Conflict(flag="--softmax-type", equals="learnable", reason="its offsets are saved in rank order"),
        Conflict(
            feature="packed-documents", reason="positions of packed documents are not spread over --tp-y"
        ),
    )
    slots = ("tp-layout",)
    replaces_roles = (
        *("input_layernorm", "pre_mlp_layernorm", "final_layernorm"),
        *("self_attn_bda", "mlp_bda"),
    )
    docs = "mindspeed_tp:docs/tp-2d.md"
    modes = ("train",)
    mode_fallback = Fallback(
        "a step of decoding has one token, which the rows of the grid cannot share; the ranks of "
        "--tensor-model-parallel-size compute the same in one dimension"
    )
    places_modules = True
    needs_open_session = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {"bytes_sent": GRID_BYTES}
    tuning = {_FLAG: (False, True)}
    verify = Proofs("mindspeed_tp.features.grid_proofs:GRID_PROOFS")

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Return what the former spelling stands for."""
        if not getattr(args, "use_nd_matmul", False):
            return {}
        return {"tp_2d": True, "tp_x": args.nd1_dim1_size, "tp_y": args.nd2_dim1_size}

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse grids that are no layout of the ranks, and sizes that the grid does not divide."""
        x, y, t = args.tp_x, args.tp_y, args.tensor_model_parallel_size
        if args.use_nd_matmul and args.nd1_dim1_size * args.nd2_dim1_size != t:
            return (
                f"{_ND1} {args.nd1_dim1_size} and {_ND2} {args.nd2_dim1_size} are two grids of the {t} "
                f"ranks of --tensor-model-parallel-size, which one layout cannot be; use sizes "
                f"whose product is {t}",
            )
        if x < 1 or y < 1 or x * y != t:
            return (
                f"--tp-x {x} times --tp-y {y} is not --tensor-model-parallel-size {t}; use factors of {t}",
            )
        found = [sentence for size, name, parts in _cuts(args) if (sentence := _uneven(size, name, parts))]
        overlaps = [flag for flag in (_AG, _RS, _BACKWARD_AG) if getattr(args, dest_of(flag), False)]
        for other in ("use_ascend_coc", "use_ascend_mc2"):
            if overlaps and getattr(args, other, False):
                flag = "--" + other.replace("_", "-")
                found.append(f"{overlaps[0]} and {flag} execute the same products; keep one of the two")
        return found

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return overlaps with nothing to hide, and sizes of the spelling that is not used."""
        found: dict[str, str] = {}
        if args.tp_y == 1:
            alone = "its rows come around the ring of --tp-y, which is 1"
            found |= dict.fromkeys((_AG, _BACKWARD_AG), alone)
            found[_RS] = "its sums are scattered over --tp-y, which is 1"
        if not args.use_nd_matmul:
            found |= {
                _ND1: f"it belongs to {_FORMER}; use --tp-x",
                _ND2: f"it belongs to {_FORMER}; use --tp-y",
            }
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say what the grid communicates where one dimension would less, and what is absorbed."""
        from mindspeed_tp.volume import LayerShape, in_words, linears, one_dimensional, table

        said, t = [], args.tensor_model_parallel_size
        shape = LayerShape.of(args)
        if t > 1 and linears(shape, args.tp_x, args.tp_y) > one_dimensional(shape, t):
            said.append(
                f"--tp-x {args.tp_x} --tp-y {args.tp_y} communicates more than one dimension, in units of "
                f"the hidden state per layer: {in_words(table(shape, t))}"
            )
        if getattr(args, "sequence_parallel", False):
            said.append(f"--sequence-parallel is absorbed: {_FLAG} spreads the sequence over --tp-x anyway")
        if args.use_nd_matmul:
            said.append(f"{_FORMER} is {_FLAG} --tp-x {args.tp_x} --tp-y {args.tp_y}, with equal results")
        return said

    @hookimpl(wrapper=True)
    def build_process_groups(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Create the groups of the grid."""
        groups = yield
        from mindspeed_tp.grid.place import X, Y, parts

        along_x, along_y = parts(args.tp_x, args.tp_y)
        session.groups.split(X, groups.tp, along_x)
        session.groups.split(Y, groups.tp, along_y)
        self._groups = groups
        return groups

    _groups: Any = None

    @hookimpl(wrapper=True)
    def build_transformer_config(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Keep megatron-core from spreading the sequence, and from expecting one shape between stages."""
        config = yield
        config.sequence_parallel = False
        from mindspeed_megatron.schedule import interleaves_natively

        if interleaves_natively(session, args):
            config.variable_seq_lengths = True
        return config

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any) -> Generator[None, Any, Any]:
        """Place norms, attention and layers of the grid."""
        spec = yield
        from mindspeed_tp.grid.placement import place_grid

        return place_grid(session, spec, lambda: self._groups)

    @hookimpl(wrapper=True)
    def build_model(self, session: Any) -> Generator[None, Any, Any]:
        """Let rotary angles be as many as there are positions, also on later pipeline stages."""
        model = yield
        from mindspeed_tp.grid.placement import lengthen_angles

        lengthen_angles(session, model)
        return model

    @hookimpl(wrapper=True)
    def boundary_schema(self, args: Any) -> Generator[None, Any, Any]:
        """Describe this rank's part of the hidden state."""
        schema = yield
        first, *others = schema.tensors
        s, b, h = first.shape
        return replace(schema, tensors=(replace(first, shape=(s // args.tp_x, b, h // args.tp_y)), *others))

    @hookimpl(wrapper=True)
    def finalize_gradients(self, model: Any) -> Generator[None, Any, Any]:
        """Sum gradients of norms and biases over the ranks that hold copies."""
        done = yield
        from mindspeed_tp.grid.gradients import sum_parts

        sum_parts(model)
        return done


def _uneven(size: int, name: str, parts: tuple[tuple[str, int], ...]) -> str:
    number, words = 1, []
    for word, count in parts:
        number *= count
        words.append(f"{word} {count}")
    if size % number == 0:
        return ""
    return f"{name} {size} is no multiple of {number} ({' times '.join(words)}); use a multiple of {number}"


def _cuts(args: Any) -> Sequence[tuple[int, str, tuple[tuple[str, int], ...]]]:
    """Return what the grid divides: the size, its flag, and what divides it."""
    from mindspeed_tp.model_sizes import ModelSizes

    x, y = ("--tp-x", args.tp_x), ("--tp-y", args.tp_y)
    cp = ("--context-parallel-size", getattr(args, "context_parallel_size", 1))
    sizes = ModelSizes.of(args)
    return (
        (args.seq_length, "--seq-length", (cp, x)),
        (args.seq_length, "--seq-length", (cp, y)),
        (sizes.hidden, "--hidden-size", (y,)),
        (sizes.width, "--ffn-hidden-size", (x,)),
        (sizes.heads, "--num-attention-heads", (x, y)),
        (sizes.groups, "--num-query-groups", (x, y)),
    )
