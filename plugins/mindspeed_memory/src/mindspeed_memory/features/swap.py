"""The declarations of saved tensors that wait on the host."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from mindspeed_core.feature import Conflict, Flag, Proofs, Requirement, dest_of, hookimpl
from mindspeed_memory.features.recompute import per_rank
from mindspeed_memory.features.saving import SavingFeature
from mindspeed_memory.host_bytes import attention_need, check_limit, input_need
from mindspeed_memory.names import models_of, modules_of

_ATTENTION, _MODULES, _INPUT = "--swap-attention", "--swap-modules", "--swap-layer-input"
_MODELS = "--swap-models"
_MIN_BYTES, _DEPTH, _LIMIT = "--swap-min-bytes", "--swap-prefetch-depth", "--swap-host-limit-gb"
_DEFAULT_MODULES = "input_norm,self_attention,post_attention_norm"
HOST_LIMIT = Flag(_LIMIT, type=float, help="Most GiB of host memory that one process uses for offloading.")
ENGINE_FLAGS = (
    Flag(_MIN_BYTES, type=int, default=1048576, help="Smallest storage in bytes that is offloaded."),
    Flag(
        _DEPTH,
        type=int,
        default=1,
        help="Modules ahead of backward whose tensors are prefetched; layers with --swap-attention.",
    ),
    HOST_LIMIT,
)
"""Of every feature that puts saved tensors away."""
ENGINE_CONFLICTS = (
    Conflict(
        # Megatron-LM has this flag alone; --cpu-offloading without a number of layers moves nothing.
        flag="--cpu-offloading-num-layers",
        reason="TransformerEngine moves the same tensors to the host; drop one of the two",
    ),
    Conflict(
        flag="--fine-grained-activation-offloading",
        reason="megatron-core moves the same tensors to the host; drop one of the two",
    ),
    Conflict(
        flag="--cuda-graph-impl",
        one_of=("local", "transformer_engine"),
        reason="a captured graph has no tensors that could be moved; drop one of the two",
    ),
)
"""Of the same."""


class SwappingFeature(SavingFeature):
    """Common part of features whose saved tensors wait on the host."""

    slots: ClassVar[Sequence[str]] = ("saved-tensors",)
    conflicts: ClassVar[Sequence[Conflict]] = ENGINE_CONFLICTS
    fake_tensors = True

    _copies: Any = None
    _from_first_step: ClassVar[bool] = True
    """It swaps in the first step already."""

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse sizes, depths and limits that are none."""
        found = []
        for flag, least in ((_MIN_BYTES, 0), (_DEPTH, 0)):
            value = getattr(args, dest_of(flag))
            if value < least:
                found.append(f"{flag} {value} is negative; use {least} or more")
        limit = getattr(args, dest_of(_LIMIT))
        if limit is not None and limit <= 0:
            found.append(f"{_LIMIT} {limit:g} leaves nothing on the host; use more than 0, or drop the flag")
        return found

    def _start_engine(self, session: Any, args: Any, calls: int = 1) -> Any:
        """Make the engine that puts tensors on the host.

        Args:
            session: its platform has the streams.
            args: of the run.
            calls: of modules that belong together, which ``--swap-prefetch-depth`` counts as one.
        """
        from mindspeed_memory.saved.engine import SavedTensors
        from mindspeed_memory.saved.host_copy import HostCopies

        self._copies = HostCopies(session.platform, args.swap_host_limit_gb)
        depth = calls * args.swap_prefetch_depth
        self._engine = SavedTensors(self._copies, min_bytes=args.swap_min_bytes, depth=depth)
        return self._engine

    def _around_step(self, run: Any) -> AbstractContextManager[Any]:
        """Return what a step of training runs in."""
        return nullcontext()

    @hookimpl(wrapper=True)
    def train_step(self, run: Any) -> Generator[None, Any, Any]:
        """Record what was swapped."""
        before = self._copies.moved, self._engine.late
        with self._around_step(run):
            result = yield
        if self._from_first_step:
            self._check_use(run, self._copies.moved - before[0])
        run.metrics.add("swapped bytes", float(self._copies.moved - before[0]), "max")
        run.metrics.add("late swaps", float(self._engine.late - before[1]), "max")
        return result


class SwapAttention(SwappingFeature):
    """Offload what attention saves for backward to host memory."""

    name = "swap-attention"
    summary = "Offload activations of attention and norms to host memory until backward"
    flags = (
        Flag(
            _ATTENTION,
            aliases=("--prefetch",),
            help="Offload what attention saves for backward to host memory.",
        ),
        Flag(
            _MODULES,
            type=str,
            default=_DEFAULT_MODULES,
            help="Modules of each layer whose saved tensors are offloaded, separated by commas.",
        ),
        Flag(
            _MODELS,
            type=str,
            default="",
            help="Sub-models that swap, with how many of their first layers do: decoder,4;vision_model,2.",
        ),
        *ENGINE_FLAGS,
    )
    requires = (
        Requirement(
            flag="--use-flash-attn",
            reason="plain attention saves scores of all pairs of tokens, too many to swap; add it",
        ),
    )
    # Around what recomputes: a norm or activation that is dropped is not swapped.
    before = ("recompute-norm", "recompute-activation", "recompute-layers-per-pp-rank")
    docs = "mindspeed_memory:docs/swap-attention.md"
    formulas = {
        # Of a layer with flash attention: the norm's result; query, key and value; the output.
        "swapped_bytes": "element_size * seq_length * micro_batch_size / context_parallel_size "
        "* (hidden_size / (tensor_model_parallel_size if sequence_parallel else 1) "
        "+ (2 * num_attention_heads + 2 * num_query_groups) * kv_channels / tensor_model_parallel_size)"
    }
    tuning = {_ATTENTION: (False, True)}
    verify = Proofs("mindspeed_memory.features.swap_proofs:ATTENTION_PROOFS")

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Switch flash attention on where a package brings it, which gives the same numbers."""
        return {"use_flash_attn": True} if cls.enabled(args) and hasattr(args, "use_flash_attn") else {}

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether it is asked for, or sub-models are named that swap."""
        return bool(getattr(args, "swap_attention", False) or getattr(args, "swap_models", ""))

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return that no layer is named to swap."""
        try:
            models = models_of(args.swap_models) if args.swap_models else {}
        except ValueError:
            # It is refused, with the reason.
            return ""
        none = models and not any(models.values())
        return f"{_MODELS} {args.swap_models} leaves no layer to swap" if none else ""

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse modules that no layer has, and lists of sub-models that are none."""
        found = list(super().validate(args))
        if args.swap_models:
            try:
                models_of(args.swap_models)
            except ValueError as error:
                found.append(f"{_MODELS} {args.swap_models}: {error}")
            if getattr(args, "recompute_granularity", None) == "full":
                found.append(
                    f"{_MODELS} {args.swap_models} with --recompute-granularity full: both say which layers "
                    "swap; drop one of the two"
                )
        try:
            modules_of(args.swap_modules)
        except ValueError as error:
            found.append(f"{_MODULES} {args.swap_modules}: {error}")
        return found

    @hookimpl(wrapper=True)
    def validate_arguments(self) -> Generator[None, Any, Any]:
        """Refuse a limit of the host that is too low."""
        args = yield
        # Of sub-models it is not known here which layers a rank has.
        if not args.swap_models:
            check_limit(_ATTENTION, args, attention_need(args))
        return args

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change the layers."""
        chunks = yield
        from mindspeed_memory.saved.attention import swap_modules

        modules = modules_of(args.swap_modules)
        # One call ahead, attention would have the backward of a norm to arrive in; a layer ahead, a layer.
        engine = self._start_engine(session, args, len(modules))
        models = models_of(args.swap_models) if args.swap_models else None
        swap_modules(
            session,
            chunks,
            self.name,
            engine,
            modules=modules,
            models=models,
            per_rank=per_rank(args),
            spare_last=bool(getattr(args, "reduce_recompute_for_last_chunk", False)),
        )
        return chunks


class SwapLayerInput(SwappingFeature):
    """Offload the inputs of recomputed layers to host memory."""

    name = "swap-layer-input"
    summary = "Offload inputs of recomputed layers to host memory until backward"
    stability = "prototype"
    flags = (
        Flag(_INPUT, help="Offload the inputs of recomputed layers to host memory."),
        *ENGINE_FLAGS,
    )
    requires = (
        Requirement(
            flag="--recompute-granularity",
            equals="full",
            reason="it is layers that are computed again whose input is all they keep",
        ),
    )
    conflicts = (
        *ENGINE_CONFLICTS,
        Conflict(
            flag="--distribute-saved-activations",
            reason="it cuts the inputs that would be swapped; drop one of the two",
        ),
    )
    before = ("recompute-layers-per-pp-rank",)
    docs = "mindspeed_memory:docs/swap-layer-input.md"
    formulas = {
        "swapped_bytes": "element_size * seq_length * micro_batch_size * hidden_size "
        "/ (context_parallel_size * (tensor_model_parallel_size if sequence_parallel else 1))"
    }
    verify = Proofs("mindspeed_memory.features.swap_proofs:INPUT_PROOFS")

    @hookimpl(wrapper=True)
    def validate_arguments(self) -> Generator[None, Any, Any]:
        """Refuse a limit of the host that is too low."""
        args = yield
        check_limit(_INPUT, args, input_need(args))
        return args

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change blocks and layers."""
        chunks = yield
        from mindspeed_memory.saved.layer_input import swap_layer_inputs

        swap_layer_inputs(session, chunks, self.name, self._start_engine(session, args))
        return chunks
