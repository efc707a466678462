"""Declarations of acme-soft-cap; imports neither torch nor megatron."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from mindspeed_core.feature import (
    Conflict,
    Fallback,
    Feature,
    Flag,
    HookApi,
    Requirement,
    Resume,
    Scenario,
    hookimpl,
)

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_CAP = Flag(
    "--acme-soft-cap",
    type=float,
    default=0.0,
    metavar="CAP",
    help="Keep attention scores within plus and minus CAP, smoothly; 0 leaves them alone.",
)
_LAYERS = Flag(
    "--acme-soft-cap-layers",
    type=int,
    nargs="+",
    metavar="N",
    help="Only in these layers, counted from 1; by default in all.",
)
_CONFLICTS = (
    Conflict(
        flag="--apply-query-key-layer-scaling",
        reason="scores are then divided by the number of their layer, and the cap would mean another number",
    ),
)
_DOCS = "acme_soft_cap:docs/soft-cap.md"
# A cap far above every score changes nothing but rounding.
_FAR = ("--acme-soft-cap", "10000")
_NEAR = ("--acme-soft-cap", "0.05")
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_PP2 = ("--pipeline-model-parallel-size", "2")


class SoftCap(Feature):
    """Attention whose scores are capped smoothly."""

    name = "acme-soft-cap"
    family = "acme"
    summary = "Cap attention scores smoothly: cap * tanh(score / cap)"
    flags: ClassVar[Sequence[Flag]] = (_CAP, _LAYERS)
    conflicts = _CONFLICTS
    slots = ("core-attention",)
    docs = _DOCS
    places_modules = True
    deterministic = True
    affects_checkpoint = False
    verify: ClassVar[Sequence[Scenario]] = (
        Scenario("far-cap", flags=_FAR),
        Scenario("far-cap-tp2-sp", flags=(*_TP2, *_FAR), baseline=_TP2, world_size=2),
        Scenario(
            "far-cap-pp2-one-layer",
            flags=(*_PP2, *_FAR, "--acme-soft-cap-layers", "3"),
            baseline=_PP2,
            world_size=2,
        ),
        # A cap that does bite: the same training in every layout, and across a checkpoint.
        Scenario(
            "cap-tp2-sp",
            flags=(*_TP2, *_NEAR),
            baseline=_NEAR,
            world_size=2,
            baseline_world_size=1,
            same_feature=True,
        ),
        Scenario("resume", flags=_NEAR, resume=Resume(flags=(*_TP2, *_NEAR), world_size=2)),
    )

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Asked for by a cap, unless the compiled form is."""
        return args.acme_soft_cap != 0.0 and not args.acme_soft_cap_compiled

    @classmethod
    def model_facts(cls, args: Any) -> Mapping[str, Any]:
        """A checkpoint with another cap, or with caps in other layers, is one of another model."""
        return {"acme_soft_cap": args.acme_soft_cap, "acme_soft_cap_layers": args.acme_soft_cap_layers}

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """The cap is positive, and the layers exist."""
        found = []
        if args.acme_soft_cap <= 0.0:
            found.append(f"--acme-soft-cap {args.acme_soft_cap} is not above 0")
        absent = [n for n in args.acme_soft_cap_layers or () if not 1 <= n <= (args.num_layers or n)]
        if absent:
            found.append(f"--acme-soft-cap-layers {absent[0]}: the model has layers 1 to {args.num_layers}")
        return found

    @hookimpl(wrapper=True)
    def build_layer_spec(
        self, session: Session, args: Any, config: Any, vp_stage: int | None
    ) -> Generator[None, Any, Any]:
        """Put the capped attention into the layers of this chunk."""
        spec = yield
        from acme_soft_cap.attention import CapOptions, place_soft_cap

        options = CapOptions(args.acme_soft_cap, compiled=self.name == SoftCapCompiled.name)
        return place_soft_cap(
            session,
            spec,
            options,
            owner=self.name,
            layers=args.acme_soft_cap_layers,
            config=config,
            vp_stage=vp_stage,
        )


class SoftCapCompiled(SoftCap):
    """The same with a compiled cap; where there is no compiler worth using, the plain one takes over."""

    name = "acme-soft-cap-compiled"
    summary = "Compile the soft cap into one kernel"
    stability = "prototype"
    flags = (Flag("--acme-soft-cap-compiled", help="Compile the cap."), _CAP, _LAYERS)
    requires = (Requirement(flag="--acme-soft-cap", reason="there is nothing to compile without a cap"),)
    platforms = ("cuda",)
    fallback = Fallback(
        feature="acme-soft-cap",
        reason="compiled code is held in eager mode on CPU, and was not tried on an NPU",
    )
    verify = (
        Scenario("far-cap", flags=(*_FAR, "--acme-soft-cap-compiled")),
        Scenario(
            "resume",
            flags=(*_NEAR, "--acme-soft-cap-compiled"),
            resume=Resume(flags=(*_TP2, *_NEAR, "--acme-soft-cap-compiled"), world_size=2),
        ),
    )

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Asked for by its own flag."""
        return bool(args.acme_soft_cap_compiled)


DECLARATIONS = (HookApi("1.3"), SoftCap, SoftCapCompiled)
