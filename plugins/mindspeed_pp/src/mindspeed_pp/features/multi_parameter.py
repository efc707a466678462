"""The declaration of several tensors between pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_core.feature import Feature, Flag, Requirement, Resume, Scenario, hookimpl
from mindspeed_pp.asked import SHAPES_FLAG, one_stage
from mindspeed_pp.features.proofs import BATCH, PP2, scheduled

if TYPE_CHECKING:
    from mindspeed_core.run import BoundarySchema

_FLAG = "--use-multiparameter-pipeline-model-parallel"
_HIDDEN = (SHAPES_FLAG, '[{"name": "hidden", "shape": ["s", "b", "h"]}]')


class MultiParameter(Feature):
    """Stages that hand on several tensors."""

    name = "multi-parameter"
    family = "pipeline-parallelism"
    summary = "Send several tensors between pipeline stages"
    flags = (
        Flag(_FLAG, help="Send the tensors of --pipeline-tensor-shapes from stage to stage."),
        Flag(
            SHAPES_FLAG,
            type=str,
            metavar="JSON",
            help="Tensors between stages, or module:function that returns them.",
        ),
    )
    requires = (
        Requirement(feature="pp-engine", reason="it sends several tensors, also between interleaved stages"),
    )
    docs = "mindspeed_pp:docs/multi-parameter.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = (
        Scenario(
            "interleaved",
            flags=(
                *(*PP2, "--num-virtual-stages-per-pipeline-rank", "2"),
                *(_FLAG, *_HIDDEN, *scheduled("interleaved")),
            ),
            baseline=(*PP2, "--num-virtual-stages-per-pipeline-rank", "2"),
            world_size=2,
            tolerance=0.0,
        ),
        Scenario(
            "resume",
            flags=(*PP2, _FLAG, *_HIDDEN, *scheduled("1f1b")),
            world_size=2,
            resume=Resume(flags=BATCH, world_size=1, with_feature=False),
        ),
    )

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether one of the flags is given."""
        asked = getattr(args, "use_multiparameter_pipeline_model_parallel", False)
        return bool(asked or getattr(args, "pipeline_tensor_shapes", None))

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return that one hidden state travels between stages, as in a pipeline without the flag."""
        if getattr(args, "pipeline_tensor_shapes", None):
            return ""
        return f"stages hand over one tensor, as without it; {SHAPES_FLAG} describes further ones"

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse shapes without the flag, and descriptions that cannot be read."""
        from mindspeed_pp.tensor_shapes import is_provider, parse_shapes

        if alone := one_stage(args):
            return alone
        text = getattr(args, "pipeline_tensor_shapes", None) or ""
        if not getattr(args, "use_multiparameter_pipeline_model_parallel", False):
            return (f"{SHAPES_FLAG} without {_FLAG}: add it, or drop the shapes",)
        if is_provider(text):
            return ()
        try:
            parse_shapes(text)
        except UserError as error:
            return (str(error),)
        return ()

    @hookimpl
    def boundary_schema(self, args: Any, config: Any) -> BoundarySchema:
        """Describe the tensors between stages."""
        from mindspeed_pp.tensor_shapes import schema_of

        return schema_of(args, config)
