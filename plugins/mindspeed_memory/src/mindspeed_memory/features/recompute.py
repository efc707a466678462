"""The declarations of what is computed again in backward."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from math import inf
from typing import Any, ClassVar

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, dest_of, hookimpl

_ACTIVATION, _ACTIVATION_LAYERS = (
    "--recompute-activation-function",
    "--recompute-activation-function-num-layers",
)
_NORM, _NORM_LAYERS = "--recompute-norm", "--recompute-norm-num-layers"
_PER_RANK, _SPARE_LAST = "--enable-recompute-layers-per-pp-rank", "--reduce-recompute-for-last-chunk"
_NOTHING_LEFT = Conflict(
    flag="--recompute-method",
    equals="uniform",
    reason="it computes every layer again as a whole, and no layer is left; use --recompute-method block",
)
_IN_GRAPHS = Conflict(
    flag="--cuda-graph-impl",
    one_of=("local", "transformer_engine"),
    reason="a captured graph neither drops nor recomputes; drop one of the two",
)
_LOW_PRECISION = Conflict(
    flag="--fp8-format", reason="TransformerEngine's products have a state of their own; drop one of the two"
)
NOT_OFFLOADED = Conflict(
    # Megatron-LM has this flag alone; --cpu-offloading without a number of layers moves nothing.
    flag="--cpu-offloading-num-layers",
    reason="TransformerEngine would move to the host what is dropped and computed again; drop one of the two",
)
PARTS = (_NOTHING_LEFT, _IN_GRAPHS, _LOW_PRECISION, NOT_OFFLOADED)
"""Conflicts of what computes parts of layers again."""
INPUTS_STAY = Conflict(
    flag="--fine-grained-activation-offloading",
    reason="megatron-core empties inputs of modules that are kept to compute the module again; drop one of "
    "the two, or use --recompute-norm or --recompute-activation-function",
)
"""Of what keeps the input of a layer or module: megatron-core releases those that it has moved by force."""


class _PartOfLayers(Feature):
    """Common part of what is computed again in parts of layers: a switch, and a number of layers."""

    family = "memory"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False

    _redundant: ClassVar[Mapping[str, str]] = {}
    """Modules that selective recomputation covers too, each with the note about it."""

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether it is asked for, or a number of layers is given, which needs it."""
        switch, number = cls.flags
        return bool(getattr(args, switch.dest, False)) or getattr(args, number.dest, None) is not None

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return why no layer is left to compute a part of again."""
        number = cls.flags[1]
        if getattr(args, number.dest, None) == 0:
            return f"{number.name} 0 leaves no layer to do so in"
        whole = getattr(args, "recompute_num_layers", None) or 0
        by_block = getattr(args, "recompute_granularity", None) == "full" and whole
        if by_block and getattr(args, "recompute_method", None) == "block" and whole >= _most_layers(args):
            return f"--recompute-num-layers {whole} computes every layer again as a whole, and none is left"
        if whole and swaps_instead_of_whole(args) and whole >= _most_layers(args):
            return (
                f"--recompute-num-layers {whole} beside swapped attention computes the feed-forward part of "
                "every layer again, and no layer is left"
            )
        return ""

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse a number without its switch, numbers of no layers, and parts that are recomputed anyway."""
        switch, number = (flag.name for flag in cls.flags)
        selected = _selected(args)
        return _layers(args, switch, number) + [
            f"{switch} with --recompute-modules {module} is redundant, {reason}"
            for module, reason in cls._redundant.items()
            if module in selected
        ]

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that a number is larger than a stage."""
        return _more_than_there_are(args, cls.flags[1].name)

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change the chosen layers."""
        chunks = yield
        count = getattr(args, self.flags[1].dest)
        swaps = swaps_instead_of_whole(args)
        self._change(session, chunks, count=count, per_rank=per_rank(args), swaps=swaps)
        return chunks

    def _change(self, session: Any, chunks: Any, **chosen: Any) -> None:
        """Change the layers that ``count`` and ``per_rank`` choose."""
        raise TypeError(f"{self.name} does not say what it changes")


class RecomputeActivation(_PartOfLayers):
    """The activation between two linear layers is dropped, and computed again for the second one."""

    name = "recompute-activation"
    summary = "Recompute activation functions of feed-forward layers in backward"
    flags = (
        Flag(_ACTIVATION, help="Recompute activation functions in backward instead of saving their outputs."),
        Flag(
            _ACTIVATION_LAYERS,
            type=int,
            help="Layers of each model chunk that do so, after those recomputed as a whole.",
        ),
    )
    conflicts = PARTS
    slots = ("mlp-forward",)
    docs = "mindspeed_memory:docs/recompute-activation.md"
    formulas = {
        # Of a dense layer whose activation is one kernel; without one it is more.
        "saved_bytes": "element_size * seq_length * micro_batch_size * ffn_hidden_size "
        "/ (context_parallel_size * tensor_model_parallel_size)"
    }
    tuning = {_ACTIVATION: (False, True)}
    verify = Proofs("mindspeed_memory.features.recompute_proofs:ACTIVATION_PROOFS")
    _redundant = {
        "mlp": "the feed-forward part is computed again anyway; drop one of the two",
        "moe_act": "both compute activations of experts again; drop moe_act",
    }

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return why no layer is left: experts keep or repeat their activations as a whole in every layer."""
        if experts_everywhere(args) and "moe" in _selected(args):
            return "--recompute-modules moe computes the experts of every layer again as a whole"
        found = super().idle(args)
        if found or not _pipelines_experts(args) or _has_dense_parts(args):
            return found
        return "--use-pipe-experts computes experts in parts that keep their results, and no layer is without"

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that a number is larger than a stage, and that pipelined experts keep their activations."""
        found = list(super().notes(args))
        if _pipelines_experts(args):
            found.append(
                f"{_ACTIVATION} leaves experts alone, which --use-pipe-experts computes in parts that keep "
                "their results"
            )
        return found

    def _change(self, session: Any, chunks: Any, **chosen: Any) -> None:
        from mindspeed_memory.recompute.activation import recompute_activations

        experts = "moe-pipe-experts" not in session.plan
        recompute_activations(session, chunks, self.name, experts=experts, **chosen)


def _pipelines_experts(args: Any) -> bool:
    return bool(getattr(args, "use_pipe_experts", False) and getattr(args, "num_experts", None))


def _has_dense_parts(args: Any) -> bool:
    """Return whether a layer has no experts, or shared ones beside them."""
    shared = ("moe_shared_expert_intermediate_size", "n_shared_experts")
    return not experts_everywhere(args) or any(getattr(args, name, None) for name in shared)


class RecomputeNorm(_PartOfLayers):
    """The results of a layer's norms are dropped, and computed again for the linear layers behind them."""

    name = "recompute-norm"
    summary = "Recompute norms of layers in backward"
    stability = "prototype"
    flags = (
        Flag(_NORM, help="Recompute norms of layers in backward instead of saving their outputs."),
        Flag(
            _NORM_LAYERS,
            type=int,
            help="Layers of each model chunk that do so, after those recomputed as a whole.",
        ),
    )
    conflicts = PARTS
    docs = "mindspeed_memory:docs/recompute-norm.md"
    formulas = {
        "saved_bytes": "2 * element_size * seq_length * micro_batch_size * hidden_size "
        "/ (context_parallel_size * (tensor_model_parallel_size if sequence_parallel else 1))"
    }
    tuning = {_NORM: (False, True)}
    verify = Proofs("mindspeed_memory.features.recompute_proofs:NORM_PROOFS")
    _redundant = {"layernorm": "both compute norms again; drop one of the two"}

    def _change(self, session: Any, chunks: Any, **chosen: Any) -> None:
        from mindspeed_memory.recompute.norm import recompute_norms

        recompute_norms(session, chunks, self.name, **chosen)


class RecomputeCounts(Feature):
    """Layers that are computed again as a whole, counted over a pipeline rank, or spared at the end."""

    name = "recompute-layers-per-pp-rank"
    family = "memory"
    summary = "Count recomputed layers over all chunks of a pipeline rank"
    flags = (
        Flag(
            _PER_RANK,
            help="Count --recompute-num-layers per pipeline rank instead of per model chunk.",
        ),
        Flag(
            _SPARE_LAST,
            help="Do not recompute the model's last layer, whose backward comes at once.",
        ),
    )
    conflicts = (
        Conflict(
            flag="--recompute-method",
            equals="uniform",
            reason="it computes every layer again as a whole, and there is no number to count; use "
            "--recompute-method block",
        ),
    )
    slots = ("recompute-count",)
    docs = "mindspeed_memory:docs/recompute-layers-per-pp-rank.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_memory.features.recompute_proofs:COUNT_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether one of its switches is set."""
        return per_rank(args) or bool(getattr(args, "reduce_recompute_for_last_chunk", False))

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return that no number of layers is given."""
        numbers = ("recompute_num_layers", dest_of(_ACTIVATION_LAYERS), dest_of(_NORM_LAYERS))
        given = any(getattr(args, name, None) for name in numbers)
        return "" if given else "no number of layers is given that it could count"

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse whole layers whose inputs are emptied."""
        moved = getattr(args, "fine_grained_activation_offloading", False)
        if moved and getattr(args, "recompute_granularity", None) == "full":
            return (f"--recompute-granularity full with {INPUTS_STAY.flag}: {INPUTS_STAY.reason}",)
        return ()

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that a number is larger than a stage."""
        return _more_than_there_are(args, "--recompute-num-layers")

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Give every chunk its number; parts of layers and swapped attention count theirs themselves."""
        chunks = yield
        from mindspeed_memory.recompute.counts import spread_counts

        spare = args.reduce_recompute_for_last_chunk
        spread_counts(session, chunks, self.name, per_rank=per_rank(args), spare_last=spare)
        return chunks


class RecomputeDense(Feature):
    """Dense feed-forward layers with biases, which megatron-core's own checkpoint never finishes."""

    name = "recompute-dense-mlp"
    family = "memory"
    summary = "Recompute whole dense feed-forward layers that have biases"
    flags = (
        Flag(
            "--recompute-modules",
            type=str,
            nargs="+",
            help="Parts of layers that selective recomputation covers.",
        ),
    )
    conflicts = (_IN_GRAPHS, _LOW_PRECISION)
    slots = ("mlp-forward",)
    docs = "mindspeed_memory:docs/recompute-dense-mlp.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_memory.features.recompute_proofs:DENSE_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether feed-forward layers are to be computed again that have biases."""
        return "mlp" in _selected(args) and bool(getattr(args, "add_bias_linear", True))

    @hookimpl(wrapper=True)
    def build_model(self, session: Any) -> Generator[None, Any, Any]:
        """Change every dense layer."""
        chunks = yield
        from mindspeed_memory.recompute.dense import recompute_dense

        recompute_dense(session, chunks, self.name)
        return chunks


def per_rank(args: Any) -> bool:
    """Return whether numbers of layers are those of a pipeline rank."""
    return bool(getattr(args, "enable_recompute_layers_per_pp_rank", False))


def _most_layers(args: Any) -> float:
    """Return the layers that numbers count at most: of a chunk, or of a rank; infinity where nobody knows."""
    layers, ranks = getattr(args, "num_layers", None), getattr(args, "pipeline_model_parallel_size", 1) or 1
    if not layers:
        return inf
    laid_out = (
        *("pipeline_model_parallel_layout", "pipeline_num_transformer_layers", "num_layer_list"),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "noop_layers"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    )
    if any(getattr(args, dest, None) for dest in laid_out):
        return int(layers)
    each = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if each and not per_rank(args):
        return int(each)
    stages = 1 if per_rank(args) else getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1
    return -(-int(layers) // (ranks * int(stages)))


def experts_everywhere(args: Any) -> bool:
    """Return whether every layer has experts, as far as flags say."""
    often = getattr(args, "moe_layer_freq", 1)
    everywhere = all(often) if isinstance(often, (list, tuple)) else often in (None, 1)
    return bool(getattr(args, "num_experts", None)) and everywhere


def swaps_instead_of_whole(args: Any) -> bool:
    """Return whether ``--recompute-num-layers`` is the number of layers that swapped attention goes with.

    Without ``--recompute-granularity`` MindSpeed lets that many layers compute their feed-forward part again.
    """
    swaps = getattr(args, "swap_attention", False) or getattr(args, "swap_models", "")
    return bool(swaps) and getattr(args, "recompute_granularity", None) is None


def _selected(args: Any) -> Sequence[str]:
    """Return what selective recomputation computes again."""
    if getattr(args, "recompute_granularity", None) != "selective":
        return ()
    return getattr(args, "recompute_modules", None) or ()


def _layers(args: Any, switch: str, number: str) -> list[str]:
    value = getattr(args, dest_of(number))
    if value is None:
        return []
    if not getattr(args, dest_of(switch)):
        return [f"{number} {value} needs {switch}; add it"]
    if value < 0:
        return [f"{number} {value} is no number of layers; use 0 or more, or leave it out for all"]
    return []


def _more_than_there_are(args: Any, number: str) -> Sequence[str]:
    value = getattr(args, dest_of(number), None)
    layers, stages = getattr(args, "num_layers", None), getattr(args, "pipeline_model_parallel_size", 1) or 1
    # The largest stage is not known here where layers are spread by hand.
    if value is None or not layers or value <= layers or stages < 1:
        return ()
    return (f"{number} {value}: the model has {layers} layers; all that a stage has are meant",)
