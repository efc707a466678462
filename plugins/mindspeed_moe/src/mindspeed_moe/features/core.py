"""The declaration of the layer of experts that other features of this package work in."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Proofs, Requirement, hookimpl


class ExpertLayer(Feature):
    """Places the layer of experts once, for every feature that changes a part of it."""

    name = "moe-core"
    family = "moe"
    summary = "Provide the expert layer that features of mindspeed-moe extend"
    before = ("grouped-experts",)
    conflicts = (
        Conflict(
            flag="--moe-latent-size",
            reason="projections to a narrower exchange are another layer's; drop it, or what needs this one",
        ),
        Conflict(
            flag="--cuda-graph-impl",
            one_of=("local", "transformer_engine"),
            reason="graphs of a part of the layer cut it at other places",
        ),
    )
    slots = ("token-dispatcher", "shared-experts")
    packages = ("torch_npu>=2.6; platform == 'npu'",)
    docs = "mindspeed_moe:docs/moe-core.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.proofs:CORE_PROOFS")

    _groups: Any = None

    @hookimpl(wrapper=True)
    def build_process_groups(self) -> Generator[None, Any, Any]:
        """Remember the groups, which megatron-core's layers hand to its own class only."""
        self._groups = yield
        return self._groups

    @hookimpl(wrapper=True)
    def build_layer_spec(
        self, session: Any, args: Any, config: Any, vp_stage: int | None
    ) -> Generator[None, Any, Any]:
        """Place the layer with the experts that other features chose."""
        spec = yield
        from mindspeed_moe.options import layer_options
        from mindspeed_moe.placement import Place, place_layers

        options = layer_options(args, session.plan.names)
        place = Place(vp_stage or 0, config.virtual_pipeline_model_parallel_size or 1)
        return place_layers(session, spec, lambda: self._groups, options, place)


PLACED_LAYER = Requirement(
    feature=ExpertLayer.name, reason="it places the layer that communicates", implies=True
)
"""Of features that communicate."""
PLACED_ROUTER = Requirement(feature=ExpertLayer.name, reason="it places the router", implies=True)
"""Of features that route tokens otherwise."""
ORDERS_COMMUNICATION = Conflict(
    flag="--overlap-moe-expert-parallel-comm",
    reason="both order the communication of a layer; keep one of the two",
)
"""Of features with a dispatcher of their own."""
