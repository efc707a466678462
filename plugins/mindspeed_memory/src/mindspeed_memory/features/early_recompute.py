"""The declarations of layers that are computed again while a pipeline rank waits for a gradient."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, hookimpl
from mindspeed_memory.features.recompute import INPUTS_STAY, NOT_OFFLOADED

_ADVANCE, _DEPTH, _BUBBLE = "--recompute-in-advance", "--recompute-in-advance-depth", "--recompute-in-bubble"
_ALL_LAYERS = -1
_PUT_AWAY = "what is computed again early would be put away at once; drop one of the two"
_WHERE_IT_WAITS = (
    Conflict(
        flag="--no-overlap-p2p-communication",
        reason="a batched exchange has no wait in which layers could be computed again; drop it",
    ),
    Conflict(
        flag="--overlap-moe-expert-parallel-comm",
        reason="passes of two micro-batches by turns leave no wait; drop one of the two",
    ),
    Conflict(
        feature="moe-fb-overlap",
        reason="passes of two micro-batches by turns leave no wait; drop one of the two",
    ),
    Conflict(
        flag="--use-megatron-fsdp",
        reason="it gathers a layer's weights around its forward and backward pass, and not before",
    ),
    Conflict(
        flag="--cuda-graph-impl",
        one_of=("local", "transformer_engine"),
        reason="a captured graph neither drops nor recomputes; drop one of the two",
    ),
    Conflict(
        flag="--fp8-format",
        reason="TransformerEngine's products have a state of their own; drop one of the two",
    ),
    NOT_OFFLOADED,
    INPUTS_STAY,
    *(
        Conflict(feature=name, reason=_PUT_AWAY)
        for name in (
            *("swap-attention", "swap-layer-input", "swap-activation-plan"),
            *("compress-activation", "compress-dense"),
        )
    ),
)


class _EarlyRecompute(Feature):
    """Common part: the schedule that computes layers again, and what it counts."""

    family = "memory"
    slots = ("recompute-policy",)
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False

    _passes: Any = None

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse pipelines without virtual stages."""
        flag = cls.flags[0].name
        if (getattr(args, "pipeline_model_parallel_size", 1) or 1) < 2 or not _interleaves(args):
            return (
                f"{flag} needs virtual stages: a rank of a plain pipeline has nothing to compute again while "
                "it waits that would not be alive anyway; add --num-virtual-stages-per-pipeline-rank 2 and "
                "--pipeline-model-parallel-size 2 or more, or drop it",
            )
        return ()

    def _start(self, depth: int) -> Any:
        from mindspeed_memory.recompute.early import EarlyPasses

        self._passes = EarlyPasses(depth)
        return self._passes

    @hookimpl(wrapper=True)
    def forward_step(self, run: Any) -> Generator[None, Any, Any]:
        """Say which pass layers belong to."""
        from mindspeed_memory.recompute.interleaving import Pass

        with self._passes.forward_step(Pass(run.context.vp_stage or 0, run.context.microbatch)):
            return (yield)

    @hookimpl(wrapper=True)
    def get_forward_backward(self, run: Any) -> Generator[None, Any, Any]:
        """Let the schedule compute layers again where it waits."""
        schedule = yield
        from mindspeed_memory.recompute.early_schedule import EarlySchedule

        in_bubble = self.flags[0].name == _BUBBLE
        return EarlySchedule(run, schedule, self._passes, flag=self.flags[0].name, in_bubble=in_bubble)

    @hookimpl(wrapper=True)
    def train_step(self, run: Any) -> Generator[None, Any, Any]:
        """Record how many layers were computed again, early and in backward."""
        early, late = self._passes.early, self._passes.late
        result = yield
        run.metrics.add("early recomputations", float(self._passes.early - early), "sum")
        run.metrics.add("late recomputations", float(self._passes.late - late), "sum")
        return result


class RecomputeInAdvance(_EarlyRecompute):
    """Layers that are computed again anyway are so while their gradient is on its way."""

    name = "recompute-in-advance"
    summary = "Recompute layers while the gradient travels between pipeline stages"
    flags = (
        Flag(_ADVANCE, help="Recompute layers while their gradient is in transit between pipeline stages."),
        Flag(
            _DEPTH,
            type=int,
            default=1,
            help="Layers of a model chunk that are recomputed early; -1 for all.",
        ),
    )
    requires = (
        Requirement(
            flag="--recompute-granularity", equals="full", reason="it is whole layers that are computed again"
        ),
        Requirement(
            flag="--recompute-method",
            equals="block",
            reason="uniform groups of layers are computed again as one; use block",
        ),
    )
    conflicts = (
        *_WHERE_IT_WAITS,
        Conflict(
            flag="--distribute-saved-activations",
            reason="inputs of layers are gathered in backward and not before; drop one of the two",
        ),
    )
    # Around what says how many layers of a chunk are computed again.
    before = ("recompute-layers-per-pp-rank",)
    docs = "mindspeed_memory:docs/recompute-in-advance.md"
    tuning = {_ADVANCE: (False, True)}
    verify = Proofs("mindspeed_memory.features.early_proofs:ADVANCE_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether it is asked for, or a depth is given, which needs it."""
        return bool(getattr(args, "recompute_in_advance", False)) or (
            getattr(args, "recompute_in_advance_depth", 1) != 1
        )

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse depths that are none, and numbers of no layers."""
        found = list(super().validate(args))
        depth, layers = args.recompute_in_advance_depth, getattr(args, "recompute_num_layers", None)
        if not args.recompute_in_advance:
            found.append(f"{_DEPTH} {depth} needs {_ADVANCE}; add it")
        elif depth != _ALL_LAYERS and depth < 1:
            found.append(f"{_DEPTH} {depth} is no number of layers; use 1 or more, or -1 for all of a chunk")
        if not layers or layers < 1:
            found.append(f"{_ADVANCE} needs layers that are computed again; add --recompute-num-layers 1")
        return found

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change the layers that are computed again."""
        chunks = yield
        from mindspeed_memory.recompute.early_layers import compute_again_in_advance

        passes = self._start(args.recompute_in_advance_depth)
        compute_again_in_advance(session, chunks, self.name, passes)
        return chunks


class RecomputeInBubble(_EarlyRecompute):
    """A rank drops the activations of the passes that are too many, and waits no longer for that."""

    name = "recompute-in-bubble"
    summary = "Recompute micro-batches of early pipeline ranks while these wait"
    flags = (
        Flag(
            _BUBBLE,
            help="Store activations of as many micro-batches on every pipeline rank as on a middle one.",
        ),
    )
    conflicts = (
        *_WHERE_IT_WAITS,
        Conflict(
            flag="--recompute-granularity",
            one_of=("full", "selective"),
            reason="both say what is computed again; drop one of the two",
        ),
    )
    docs = "mindspeed_memory:docs/recompute-in-bubble.md"
    tuning = {_BUBBLE: (False, True)}
    verify = Proofs("mindspeed_memory.features.early_proofs:BUBBLE_PROOFS")

    @hookimpl(wrapper=True)
    def build_model(self, session: Any) -> Generator[None, Any, Any]:
        """Let every layer drop its activations where it is told to."""
        chunks = yield
        from mindspeed_memory.recompute.early_layers import compute_again_in_bubble

        compute_again_in_bubble(session, chunks, self.name, self._start(_ALL_LAYERS))
        return chunks


def _interleaves(args: Any) -> bool:
    """Return whether ranks have several model chunks, as far as flags say; a layout says it later."""
    if getattr(args, "pipeline_model_parallel_layout", None):
        return True
    derived = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    stages = getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1
    per_chunk = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    return derived > 1 or stages > 1 or bool(per_chunk)
