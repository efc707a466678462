"""The declaration of AscendSpeed's names for full recomputation, which stand for megatron-core's."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Gain, Resume, Scenario, dest_of, hookimpl
from mindspeed_memory.features.proofs import MODEL, PP2, SHARDED, TP2, as_without, fully_sharded

_SWITCH, _POLICY, _BLOCK = "--checkpoint-activations", "--checkpoint-policy", "--checkpoint_block_layer"
_COUNTS, _DISTRIBUTE = "--recomputation-layer-num", "--distribute-checkpointed-activations"
_BLOCK_LAYERS = 25
_RESUMED = (*MODEL, "--hidden-dropout", "0", "--attention-dropout", "0", *SHARDED)


class CheckpointActivations(Feature):
    """Layers are computed again as a whole, under the names that AscendSpeed gave it."""

    name = "checkpoint-activations"
    family = "memory"
    summary = "Accept AscendSpeed's flag names of full recomputation"
    level = 0
    flags = (
        Flag(_SWITCH, help="Recompute layers in backward, as --recompute-granularity full."),
        Flag(
            _POLICY,
            type=str,
            default="full",
            choices=("full", "block", "custom"),
            help="Layers that are recomputed: all, the first ones, or those of a measured plan.",
        ),
        Flag(
            _BLOCK,
            type=int,
            default=_BLOCK_LAYERS,
            help="Layers of each model chunk that are recomputed with --checkpoint-policy block.",
        ),
        Flag(
            _COUNTS,
            type=int,
            nargs="+",
            help="The same for each pipeline stage, one number per stage.",
        ),
        Flag(_DISTRIBUTE, help="Older spelling of --distribute-saved-activations."),
    )
    conflicts = tuple(
        Conflict(
            feature=policy,
            reason=f"a measured plan says what is computed again; drop {_SWITCH}",
        )
        for policy in ("adaptive-recompute", "adaptive-memory")
    )
    hosts = ("standalone", "megatron-lm")
    docs = "mindspeed_memory:docs/checkpoint-activations.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {
        "kept_bytes": "element_size * seq_length * micro_batch_size * hidden_size "
        "/ (context_parallel_size * (tensor_model_parallel_size if sequence_parallel else 1))"
    }
    verify = (
        as_without("full", (_SWITCH,), model=MODEL, gains=(Gain("forward_bytes", 0.4),)),
        as_without("block", (_SWITCH, _POLICY, "block", _BLOCK, "2"), gains=(Gain("forward_bytes", 0.8),)),
        as_without("stages", (_SWITCH, _COUNTS, "1", "2"), *PP2, ranks=2),
        as_without(
            "distributed",
            (_SWITCH, _DISTRIBUTE),
            *TP2[:2],
            ranks=2,
        ),
        *fully_sharded((_SWITCH,)),
        Scenario(
            "resume",
            flags=(*_RESUMED, _SWITCH),
            world_size=2,
            resume=Resume(flags=_RESUMED, world_size=1, with_feature=False),
        ),
    )

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether one of its flags asks for recomputation; measured plans are another feature."""
        asked = any(getattr(args, dest_of(flag), None) for flag in (_SWITCH, _COUNTS, _DISTRIBUTE))
        return asked or cls._unused(args) != []

    @classmethod
    def _unused(cls, args: Any) -> list[str]:
        """Return flags that mean nothing without the switch."""
        if getattr(args, dest_of(_SWITCH), False):
            return []
        policy, size = (
            getattr(args, dest_of(_POLICY), "full"),
            getattr(args, "adaptive_recompute_device_size", 0),
        )
        measured = policy == "custom" and (size or 0) > 0
        found = [f"{_POLICY} {policy}"] if policy != "full" and not measured else []
        if getattr(args, dest_of(_BLOCK), _BLOCK_LAYERS) != _BLOCK_LAYERS:
            found.append(f"{_BLOCK} {getattr(args, dest_of(_BLOCK))}")
        if getattr(args, dest_of(_COUNTS), None):
            found.append(_COUNTS)
        return found

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Return what the names stand for."""
        found: dict[str, Any] = {}
        if getattr(args, dest_of(_SWITCH), False) and getattr(args, dest_of(_POLICY), "full") != "custom":
            found = cls._meaning(args)
        if getattr(args, dest_of(_DISTRIBUTE), False):
            found["distribute_saved_activations"] = True
        return found

    @classmethod
    def _meaning(cls, args: Any) -> dict[str, Any]:
        counts = getattr(args, dest_of(_COUNTS), None)
        by_block = getattr(args, dest_of(_POLICY), "full") == "block"
        number = 1
        if counts or by_block:
            # Of more layers than there are, all are meant.
            number = max(counts) if counts else getattr(args, dest_of(_BLOCK), _BLOCK_LAYERS)
            number = max(0, min(number, getattr(args, "num_layers", None) or number))
        method = "block" if counts or by_block else "uniform"
        return {
            "recompute_granularity": "full",
            "recompute_method": method,
            "recompute_num_layers": number,
        }

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse names without their switch, numbers of no layers, and other meanings beside these."""
        found = [f"{flag} needs {_SWITCH}; add it" for flag in cls._unused(args)]
        if args.checkpoint_policy == "custom":
            found.append(
                f"{_POLICY} custom names no layers; use full or block, or let measured costs decide: "
                f"--adaptive-recompute-device-size, without {_SWITCH}"
            )
        elif args.checkpoint_activations:
            for dest, value in cls._meaning(args).items():
                if getattr(args, dest, value) != value:
                    flag = "--" + dest.replace("_", "-")
                    given = getattr(args, dest)
                    found.append(f"{flag} {given}: {_SWITCH} stands for {flag} {value}; drop one of the two")
        return found + cls._wrong_numbers(args)

    @classmethod
    def _wrong_numbers(cls, args: Any) -> list[str]:
        found = []
        if args.checkpoint_block_layer < 0:
            found.append(f"{_BLOCK} {args.checkpoint_block_layer} is no number of layers; use 0 or more")
        counts, stages = args.recomputation_layer_num, getattr(args, "pipeline_model_parallel_size", 1) or 1
        if counts:
            shown = " ".join(map(str, counts))
            if len(counts) != stages:
                found.append(
                    f"{_COUNTS} {shown} has {len(counts)} numbers for {stages} pipeline stages; give one each"
                )
            if min(counts) < 0:
                found.append(f"{_COUNTS} {shown}: {min(counts)} is no number of layers; use 0 or more")
            for flag in ("--enable-recompute-layers-per-pp-rank", "--reduce-recompute-for-last-chunk"):
                if getattr(args, dest_of(flag), False):
                    found.append(f"{flag} and {_COUNTS} both count layers of a stage; drop one of the two")
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that a number is larger than the model."""
        layers = getattr(args, "num_layers", None)
        numbers = args.recomputation_layer_num or (
            [args.checkpoint_block_layer] if args.checkpoint_policy == "block" else []
        )
        if not layers or not numbers or max(numbers) <= layers:
            return ()
        flag = _COUNTS if args.recomputation_layer_num else _BLOCK
        return (f"{flag} {max(numbers)}: the model has {layers} layers; all that a stage has are meant",)

    @hookimpl(wrapper=True)
    def validate_arguments_early(self) -> Generator[None, Any, Any]:
        """Hide the switch from Megatron-LM, which refuses it as out of date."""
        args = yield
        hidden = type(args)(**vars(args))
        hidden.checkpoint_activations = False
        return hidden

    @hookimpl(wrapper=True)
    def build_transformer_config(self, args: Any) -> Generator[None, Any, Any]:
        """Give the stage its number of layers."""
        config = yield
        if not args.recomputation_layer_num:
            return config
        from megatron.core import parallel_state

        stage = parallel_state.get_pipeline_model_parallel_rank()
        return replace(config, recompute_num_layers=args.recomputation_layer_num[stage])
