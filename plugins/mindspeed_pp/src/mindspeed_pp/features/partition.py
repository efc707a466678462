"""The declarations of how many layers each pipeline stage holds."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, hookimpl
from mindspeed_megatron.layer_patterns import PATTERNS
from mindspeed_pp.stage_map import LIST, NOOP, ROWS, layers_of_stages, layout_text, numbers

_KEEP = "--noop-layers-keep-numbering"
_FAMILY = "pipeline-parallelism"
_REQUIRES = (
    Requirement(flag="--pipeline-model-parallel-size", reason="layers are distributed over pipeline stages"),
)
_CONFLICTS = tuple(
    Conflict(flag=flag, reason="it says too how many layers a stage has; keep one of the two")
    for flag in (
        "--pipeline-model-parallel-layout",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
    )
)


class _Partition(Feature):
    """Layers of stages, as megatron-core's layout."""

    family = _FAMILY
    requires = _REQUIRES
    conflicts = _CONFLICTS
    # Around the engine: it says how many chunks a rank has.
    before = ("pp-engine",)
    slots = ("layer-partition",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse numbers that do not go with the model and its pipeline."""
        if not getattr(args, "num_layers", None):
            return ()
        try:
            layers_of_stages(args)
        except UserError as error:
            return (str(error),)
        return ()

    @hookimpl(wrapper=True)
    def validate_arguments_early(self, args: Any) -> Generator[None, Any, Any]:
        """Lay the layers out."""
        given = yield
        self._settle(given)
        stages, given.num_layers = layers_of_stages(given)
        given.pipeline_model_parallel_layout = layout_text(
            stages, getattr(given, "mtp_num_layers", None) or 0
        )
        given.num_layers_per_virtual_pipeline_stage = given.num_virtual_stages_per_pipeline_rank = None
        return given

    def _settle(self, given: Any) -> None:
        """Settle what else counts layers, before the arguments say how many there are."""


class NoopLayers(_Partition):
    """Positions without a layer, so that stages with embedding or output layer hold fewer."""

    name = "noop-layers"
    summary = "Leave positions without a layer to balance pipeline stages"
    flags = (
        Flag(
            NOOP, type=str, help="Positions without a layer, counted from 0: 0,5. --num-layers counts them."
        ),
    )
    docs = "mindspeed_pp:docs/noop-layers.md"
    verify = Proofs("mindspeed_pp.features.proofs:NOOP_PROOFS")

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return which layers a frequency counts."""
        return tuple(
            f"--{name.replace('_', '-')} {every} counts the layers that are there, and MindSpeed counts "
            f"positions; a list of {args.num_layers} says it by position"
            for name in PATTERNS
            if isinstance(every := getattr(args, name, None), int) and every > 1
        )

    def _settle(self, given: Any) -> None:
        """Leave the empty positions out of lists that name every position."""
        empty = {*numbers(NOOP, given.noop_layers)}
        for name in PATTERNS:
            listed = getattr(given, name, None)
            if isinstance(listed, list) and len(listed) == given.num_layers:
                setattr(given, name, [value for at, value in enumerate(listed) if at not in empty])


class NoopKeys(Feature):
    """Layers under their position in checkpoints."""

    name = "noop-layer-keys"
    family = _FAMILY
    summary = "Name layers in checkpoints by their position, empty positions included"
    flags = (Flag(_KEEP, help="Name layers in checkpoints by position, empty positions included."),)
    requires = (Requirement(feature="noop-layers", reason="without it positions are the numbers of layers"),)
    # A loop of one's own names what it saves.
    hosts = ("standalone", "megatron-lm")
    docs = "mindspeed_pp:docs/noop-layer-keys.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = True
    formulas = {"activation_bytes": "0", "bytes_sent": "0", "flop": "0"}
    verify = Proofs("mindspeed_pp.features.proofs:KEYS_PROOFS")

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse formats whose keys have no number of a layer."""
        kind = getattr(args, "ckpt_format", None)
        if kind in (None, "torch_dist"):
            return ()
        return (
            f"{_KEEP} with --ckpt-format {kind}: only torch_dist names layers by a number of the model; use "
            "--ckpt-format torch_dist",
        )

    @hookimpl(wrapper=True)
    def build_transformer_config(self) -> Generator[None, Any, Any]:
        """Give each layer a key of its own."""
        config = yield
        config.hetereogenous_dist_checkpoint = True
        return config

    @hookimpl(wrapper=True)
    def model_state(self, run: Any) -> Generator[None, Any, Any]:
        """Name each layer by its position."""
        state = yield
        from mindspeed_pp.layer_keys import positions, with_positions

        return with_positions(state, positions(run.args.num_layers, numbers(NOOP, run.args.noop_layers)))


class UnalignedPipeline(_Partition):
    """Layers of every chunk of every rank."""

    name = "unaligned-pipeline"
    summary = "Set the number of layers of each pipeline stage and chunk"
    flags = (Flag(ROWS, type=str, help="Layers by rank and chunk, [[1,1],[1,1]*2,[1,0]]; *n repeats a row."),)
    docs = "mindspeed_pp:docs/unaligned-pipeline.md"
    verify = Proofs("mindspeed_pp.features.proofs:ROWS_PROOFS")


class NumLayerList(_Partition):
    """Layers of every rank."""

    name = "num-layer-list"
    summary = "Set the number of layers of each pipeline rank"
    flags = (Flag(LIST, type=str, help="Layers of each pipeline rank: 8,9,8,7."),)
    docs = "mindspeed_pp:docs/num-layer-list.md"
    verify = Proofs("mindspeed_pp.features.proofs:LIST_PROOFS")
