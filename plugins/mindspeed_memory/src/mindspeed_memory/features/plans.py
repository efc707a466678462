"""The declarations of plans: modules that patterns of names choose, computed again or swapped."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Gain, hookimpl
from mindspeed_memory.features.proofs import EXPERTS, FUSED_LLAMA, as_without, fully_sharded, in_layouts
from mindspeed_memory.features.recompute import INPUTS_STAY, NOT_OFFLOADED
from mindspeed_memory.features.swap import ENGINE_FLAGS, SwappingFeature
from mindspeed_memory.patterns import Pattern

_LAYERS = ("--recompute-plan", "decoder.layers.{*}")
_PARTS = ("--recompute-plan", "decoder.layers.{0-1}.mlp", "decoder.layers.{2,3}.self_attention")
_SWAPPED = ("--swap-activation-plan", "decoder.layers.{0-2}", "--swap-min-bytes", "1024")
_TOKENS, _WIDTH, _FLOAT = 32, 256, 4

RECOMPUTE_PROOFS = (
    # Biases are among the results of these modules. Two of four layers drop product and activation.
    as_without(
        "feed-forward",
        ("--recompute-plan", "decoder.layers.{0-1}.mlp"),
        gains=(Gain("forward_bytes", less=2 * 2 * _TOKENS * _WIDTH * _FLOAT),),
    ),
    as_without("layers", _LAYERS, model=FUSED_LLAMA, gains=(Gain("forward_bytes", 0.5),)),
    *in_layouts(_PARTS),
    as_without("experts", _LAYERS, model=EXPERTS),
    *fully_sharded(_LAYERS),
)
SWAP_PROOFS = (
    as_without(
        "layers",
        _SWAPPED,
        model=FUSED_LLAMA,
        gains=(Gain("forward_bytes", 0.7), Gain("host_buffers", less=0)),
    ),
    *in_layouts(_SWAPPED),
    as_without("with-recomputed-parts", (*_SWAPPED, *_PARTS), model=FUSED_LLAMA, baseline=()),
    *fully_sharded(_SWAPPED, model=FUSED_LLAMA),
)


_RECOMPUTE, _SWAP = "--recompute-plan", "--swap-activation-plan"


class RecomputePlan(Feature):
    """Modules that patterns name are computed again in backward."""

    name = "recompute-plan"
    family = "memory"
    summary = "Recompute modules chosen by name patterns in backward"
    flags = (
        Flag(
            _RECOMPUTE,
            type=str,
            nargs="+",
            help="Name patterns of modules that are recomputed, such as decoder.layers.{0-3}.mlp.",
        ),
    )
    conflicts = (
        Conflict(
            flag="--recompute-granularity",
            one_of=("full", "selective"),
            reason="both say what is computed again; drop one of the two",
        ),
        Conflict(
            flag="--cuda-graph-impl",
            one_of=("local", "transformer_engine"),
            reason="a captured graph neither drops nor recomputes; drop one of the two",
        ),
        NOT_OFFLOADED,
        INPUTS_STAY,
    )
    slots = ("recompute-policy",)
    # Around what drops a part of a module.
    before = ("recompute-norm", "recompute-activation")
    docs = "mindspeed_memory:docs/recompute-plan.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = RECOMPUTE_PROOFS

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse texts that are no patterns."""
        return _wrong(_RECOMPUTE, args.recompute_plan)

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change the modules."""
        chunks = yield
        from mindspeed_memory.planned_modules import planned_modules
        from mindspeed_memory.recompute.modules import checkpointed

        for module in planned_modules(session, chunks, _RECOMPUTE, args.recompute_plan):
            session.instances.set(self.name, module, "forward", checkpointed(module))
        return chunks


class SwapPlan(SwappingFeature):
    """Offload what modules save whose names match patterns to host memory."""

    name = "swap-activation-plan"
    summary = "Offload saved activations of modules chosen by name patterns"
    flags = (
        Flag(
            _SWAP,
            type=str,
            nargs="+",
            help="Name patterns of modules whose saved tensors are offloaded, as in decoder.layers.{0-3}.",
        ),
        *ENGINE_FLAGS,
    )
    # Around what recomputes.
    before = ("recompute-norm", "recompute-activation", "recompute-plan")
    docs = "mindspeed_memory:docs/swap-activation-plan.md"
    verify = SWAP_PROOFS

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse texts that are no patterns."""
        return [*super().validate(args), *_wrong(_SWAP, args.swap_activation_plan)]

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change the modules."""
        chunks = yield
        from mindspeed_memory.planned_modules import planned_modules

        engine = self._start_engine(session, args)
        for module in planned_modules(session, chunks, _SWAP, args.swap_activation_plan):
            session.instances.set(self.name, module, "forward", engine.scope(module.forward))
        return chunks


def _wrong(flag: str, patterns: Sequence[str]) -> Sequence[str]:
    found = []
    for text in patterns:
        try:
            Pattern.of(text)
        except ValueError as error:
            found.append(f"{flag} {text}: {error}")
    return found
