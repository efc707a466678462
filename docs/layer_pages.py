"""The page of layer specifications: the editor, and the role of every module in megatron-core's own trees."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from class_pages import class_sections, classes
from tables import code, table

Sites = list[tuple[str, str]]


def layers_page() -> str:
    """The editor of layer specifications and the roles."""
    package = "packages/mindspeed_megatron/src/mindspeed_megatron"
    defined = classes(f"{package}/layer_spec.py") | classes(f"{package}/layer_sites.py")
    lines = [
        "# Layer specifications",
        "",
        "A feature that replaces modules wraps the stage [`build_layer_spec`](stages.md#build_layer_spec)",
        "and edits its result by the roles of the modules.",
        *class_sections(defined[name] for name in ("SpecEditor", "Site", "Replacement")),
        "",
        "## Roles",
        "",
        "The trees of megatron-core's local layers, from which models are built without TransformerEngine. A",
        "role is shown with the roles around it, of which any number from the right may be given: `fc1` is",
        "every first linear, `experts.fc1` that of an expert. At an *empty* site nothing is specified;",
        "`empty=True` fills it. Each table lists what the ones before lack.",
        "",
        "Hosts put classes of their own at some of these places first, with the same roles: norms that work",
        "with sequence parallelism, and experts whose copies stay equal. With `--transformer-impl",
        "transformer_engine` the classes are TransformerEngine's; a linear module that follows a norm",
        "contains it there, and `input_layernorm` or `pre_mlp_layernorm` is empty.",
    ]
    before: Sites = []
    for title, sites in trees():
        new = [site for site in sites if site not in before and not inside_prediction(site, before)]
        before += new
        lines += ["", f"### {title}", "", *table(("role", "megatron-core's module"), role_rows(new))]
    return "\n".join(lines)


def inside_prediction(site: tuple[str, str], decoder: Sites) -> bool:
    """Return whether a site lies inside the layer of a prediction, which is like one of the decoder."""
    role, module = site
    return role.startswith("layer.layer.") and (role.removeprefix("layer."), module) in decoder


def role_rows(sites: Sites) -> Iterator[tuple[str, str]]:
    """Rows of the table of roles, each site once."""
    for role, module in dict.fromkeys(sites):
        yield code(role), code(module) or "*empty*"


def trees() -> Iterator[tuple[str, Sites]]:
    """The sites of each kind of model: dotted role and class, the class empty where nothing stands."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec as layer_spec
        from megatron.core.transformer.multi_token_prediction import (
            MultiTokenPredictionBlockSubmodules,
            get_mtp_layer_spec,
        )
        from megatron.core.transformer.torch_norm import WrappedTorchNorm
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        def block(**options: Any) -> Sites:
            layers = TransformerBlockSubmodules([layer_spec(**options)], layer_norm=WrappedTorchNorm)
            return sites_of(layers)

        yield "A dense model", block()
        yield "With --qk-layernorm", block(qk_layernorm=True)
        yield "With --num-experts", block(num_experts=2)
        yield "With --num-experts and --moe-grouped-gemm", block(num_experts=2, moe_grouped_gemm=True)
        yield "With --multi-latent-attention", block(multi_latent_attention=True, qk_layernorm=True)
        prediction = get_mtp_layer_spec(layer_spec(), use_transformer_engine=False)
        yield "With --mtp-num-layers", sites_of(MultiTokenPredictionBlockSubmodules([prediction]))


def sites_of(tree: Any) -> Sites:
    """Dotted role and class of every place of a tree."""
    from mindspeed_megatron.layer_spec import SpecEditor

    return [
        (
            ".".join((*site.within, site.role)),
            "" if site.spec is None else getattr(site.spec.module, "__qualname__", str(site.spec.module)),
        )
        for site in SpecEditor(tree, owner="").find(empty=True)
    ]
