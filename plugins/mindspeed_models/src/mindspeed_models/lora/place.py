"""Placement of adapters: around the linears that a layer specification ends up with, outermost of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer import ModuleSpec

from mindspeed_core.errors import UserError
from mindspeed_megatron.layer_spec import Site, SpecEditor
from mindspeed_megatron.linear_layout import is_opaque, layout_of
from mindspeed_megatron.unwrap import unwrap
from mindspeed_models.lora.linears import adapt_instance, adapted, takes_adapters
from mindspeed_models.lora.options import NAME, TARGETS, LoraOptions
from mindspeed_models.lora.targets import COMPRESSING, OUTPUT, SPECIFIED

if TYPE_CHECKING:
    from mindspeed_core.session import Session


def place_adapters(
    session: Session, spec: Any, options: LoraOptions, config: Any, vp_stage: int | None, seed: int
) -> Any:
    """Return the tree with an adapter beside every linear that is a target.

    Args:
        session: counts what is placed.
        spec: the tree of a chunk.
        options: of the adapters.
        config: of the model.
        vp_stage: of the chunk.
        seed: of the run.

    Raises:
        UserError: another linear than megatron-core's stands there, or routed experts.
        LinearLayoutError: the linear there has parts of input and output that are not megatron-core's.
    """
    editor = SpecEditor(spec, owner=NAME, session=session, config=config, vp_stage=vp_stage)

    def put(site: Site) -> ModuleSpec | None:
        module: Any = site.spec.module if site.spec is not None else None
        if "experts" in site.within:
            raise UserError(
                f"{TARGETS}: {site.role} ({site.path}) belongs to routed experts, which get no adapters; "
                "name linears of attention (linear_qkv linear_proj)"
            )
        if not takes_adapters(module):
            name = getattr(module, "__qualname__", module)
            owner = f" of {site.placed_by}" if site.placed_by else ""
            raise UserError(
                f"{TARGETS}: {site.role} ({site.path}) is {name}{owner}, and adapters stand beside column- "
                "and row-parallel linears of megatron-core; use --transformer-impl local, or drop the target"
            )
        place = ".".join((str(site.layer_number), *site.within, site.role))
        gated = site.role == "fc1" and bool(config.gated_linear_unit)
        return site.carry(adapted(module), lora=options.of_linear(site.role, f"{seed}.{place}", gated=gated))

    roles = tuple(role for role in options.roles if role in SPECIFIED)
    if roles:
        editor.replace(roles, put, wrap=True)
    return editor.spec


def adapt_compressing(session: Session, chunks: list[Any], options: LoraOptions, seed: int) -> None:
    """Put adapters beside the linears that latent attention compresses with, where they are targets.

    Attention builds them of a class that it knows by name, so they are changed once they are there.

    Raises:
        UserError: another linear than megatron-core's stands there.
    """
    wanted = [role for role in options.roles if role in COMPRESSING]
    found = 0
    for module in (each for chunk in chunks for each in unwrap(chunk).modules()):
        for role in wanted:
            linear = getattr(module, f"linear_{role}", None)
            if linear is None:
                continue
            if not takes_adapters(type(linear)) or layout_of(type(linear)) is not None:
                raise UserError(
                    f"{TARGETS}: {role} is {type(linear).__name__}, and adapters stand beside column- and "
                    "row-parallel linears of megatron-core; use --transformer-impl local, or drop the target"
                )
            place = f"{seed}.{module.layer_number}.self_attention.{role}"
            adapt_instance(linear, options.of_linear(role, place))
            found += 1
    if wanted:
        session.place(NAME, found)


def adapt_output_layers(session: Session, chunks: list[Any], options: LoraOptions, seed: int) -> None:
    """Put an adapter beside the output layer, where that is a target and a chunk has one.

    Raises:
        UserError: its weight is the embedding's.
    """
    if OUTPUT not in options.roles:
        return
    found = 0
    for chunk in chunks:
        model = unwrap(chunk)
        layer = getattr(model, OUTPUT, None)
        if layer is None:
            continue
        if model.share_embeddings_and_output_weights:
            raise UserError(
                f"{TARGETS} {OUTPUT}: its weight is that of the embedding, which an update cannot be merged "
                "into; add --untie-embeddings-and-output-weights, or drop the target"
            )
        if "forward" in vars(layer) or is_opaque(layer):
            raise UserError(
                f"{TARGETS} {OUTPUT}: the output layer is {type(layer).__name__}, and another feature "
                "computes its logits (--lm-loss-chunks, --lm-norm-weight), which an adapter would not "
                "reach; drop one "
                "of the two"
            )
        adapt_instance(layer, options.of_linear(OUTPUT, f"{seed}.{OUTPUT}"))
        found += 1
    session.place(NAME, found)
