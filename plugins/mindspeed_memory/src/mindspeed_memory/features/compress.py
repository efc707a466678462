"""The declarations of saved tensors that wait in compressed form."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Flag, Proofs, Requirement, hookimpl
from mindspeed_memory.features.recompute import experts_everywhere
from mindspeed_memory.features.saving import SavingFeature
from mindspeed_memory.features.swap import ENGINE_CONFLICTS, HOST_LIMIT
from mindspeed_memory.saved.chosen_layers import chosen_layers

_ACTIVATION, _DENSE, _SMALLEST = "--compress-activation", "--compress-dense", "--compress-min-elements"
DISABLED, LEVEL0, LEVEL1 = "disable", "level0", "level1"
_ELEMENTS = Flag(
    _SMALLEST, type=int, default=32768, help="Smallest number of elements of a tensor that is compressed."
)
_HALF_PRECISION = Requirement(
    flag="--bf16", reason="it is exponents of bfloat16 that are compressed; other types are kept as they are"
)
_COMPUTED_AGAIN = Conflict(
    flag="--recompute-granularity",
    equals="full",
    reason="layers that are computed again keep nothing that could be compressed; drop one of the two",
)


class _Compressing(SavingFeature):
    """Common part of features whose engine compresses."""

    stability = "prototype"
    requires = (_HALF_PRECISION,)
    # How far numbers can be compressed depends on them.
    fake_tensors = False

    _codec: Any = None
    _does = "compress"
    _smallest = _SMALLEST

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse a number of elements that is none."""
        smallest = args.compress_min_elements
        return [f"{_SMALLEST} {smallest} is no number of elements; use 1 or more"] if smallest < 1 else []

    def _start(self, session: Any, args: Any, *, on_host: bool) -> Any:
        from mindspeed_memory.saved.compressors import compressor
        from mindspeed_memory.saved.engine import SavedTensors

        self._codec = compressor(
            session.platform,
            smallest=args.compress_min_elements,
            on_host=on_host,
            limit_gib=args.swap_host_limit_gb,
        )
        self._engine = SavedTensors(self._codec, min_bytes=1, depth=1 if on_host else 0)
        return self._engine

    @hookimpl(wrapper=True)
    def train_step(self, run: Any) -> Generator[None, Any, Any]:
        """Record how far saved tensors were compressed."""
        before = self._codec.before, self._codec.after
        result = yield
        size, left = self._codec.before - before[0], self._codec.after - before[1]
        self._check_use(run, size)
        run.metrics.add("compressed bytes", float(size), "max")
        run.metrics.add("compression ratio", left / size if size else 1.0, "max")
        return result


class CompressActivation(_Compressing):
    """Compress what chosen layers save for backward, without loss."""

    name = "compress-activation"
    summary = "Compress saved activations of chosen layers without loss until backward"
    flags = (
        Flag(
            _ACTIVATION,
            type=str,
            default="",
            help="Layers whose saved tensors are compressed: 0 for all, or numbers from 1, as in 1-3,5.",
        ),
        _ELEMENTS,
        HOST_LIMIT,
    )
    conflicts = (
        *ENGINE_CONFLICTS,
        _COMPUTED_AGAIN,
        Conflict(
            feature="recompute-activation",
            reason="activations that are dropped would be compressed first; drop one of the two",
        ),
        Conflict(
            feature="recompute-norm",
            reason="norms that are dropped would be compressed first; drop one of the two",
        ),
    )
    slots = ("saved-tensors",)
    docs = "mindspeed_memory:docs/compress-activation.md"
    verify = Proofs("mindspeed_memory.features.compress_proofs:ACTIVATION_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse lists of layers that there are not."""
        found = list(super().validate(args))
        try:
            chosen_layers(args.compress_activation, getattr(args, "num_layers", None) or 0)
        except ValueError as error:
            found.append(f"{_ACTIVATION} {args.compress_activation}: {error}")
        return found

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change the chosen layers."""
        chunks = yield
        from mindspeed_memory.recompute.layers import layers_of

        engine = self._start(session, args, on_host=False)
        numbers = chosen_layers(args.compress_activation, args.num_layers)
        every = len(numbers) == args.num_layers
        for placed in layers_of(chunks):
            if every if placed.predicts else placed.layer.layer_number in numbers:
                session.instances.set(self.name, placed.layer, "forward", engine.scope(placed.layer.forward))
        return chunks


class CompressDense(_Compressing):
    """The result of a feed-forward layer's first product is compressed, without loss."""

    name = "compress-dense"
    summary = "Compress the first product of feed-forward layers without loss until backward"
    flags = (
        Flag(
            _DENSE,
            type=str,
            default=DISABLED,
            choices=(DISABLED, LEVEL0, LEVEL1),
            help=(
                "Compress outputs of the first GEMM: level0 on device, level1 with sign and mantissa "
                "on the host."
            ),
        ),
        _ELEMENTS,
        HOST_LIMIT,
    )
    conflicts = (*ENGINE_CONFLICTS, _COMPUTED_AGAIN)
    slots = ("saved-tensors", "mlp-forward")
    docs = "mindspeed_memory:docs/compress-dense.md"
    verify = Proofs("mindspeed_memory.features.compress_proofs:DENSE_PROOFS")

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return that there is no dense layer."""
        everywhere = experts_everywhere(args)
        return "every layer has experts, and it is first products of dense layers" if everywhere else ""

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that a bias which is added by itself makes another tensor."""
        fused = getattr(args, "bias_gelu_fusion", True) and getattr(args, "bias_swiglu_fusion", True)
        if not getattr(args, "add_bias_linear", True) or fused:
            return ()
        return (
            f"{_DENSE} {args.compress_dense}: without a fused activation the bias is added first, and its "
            "result is kept as it is; --disable-bias-linear or a fused activation lets it be compressed",
        )

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change every dense layer."""
        chunks = yield
        from mindspeed_memory.saved.first_products import put_first_products_away

        engine = self._start(session, args, on_host=args.compress_dense == LEVEL1)
        put_first_products_away(session, chunks, self.name, engine)
        return chunks
