"""The specification editor on the trees that megatron-core builds: dense, MoE, MLA, token prediction."""

from dataclasses import fields

import pytest
import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from mindspeed_core.errors import UserError
from mindspeed_core.resolver.plan import ActiveFeature, Plan
from mindspeed_core.runtime.instance_patches import Roles
from mindspeed_megatron.layer_sites import LayerSpecError, LinearLayoutError
from mindspeed_megatron.layer_spec import ANY_LAYOUT, NORM_ROLES, LinearLayout, SpecEditor
from mindspeed_megatron.spec_forms import as_spec


class Norm:
    pass


class OtherNorm:
    pass


class Attention:
    pass


class Placements:
    """The part of a session that the editor uses."""

    def __init__(self):
        self.counts = {}
        self.roles = Roles()

    def place(self, owner, count, **roles):
        self.counts[owner] = self.counts.get(owner, 0) + count
        self.roles.add(**roles)


def config(**changes):
    values = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "pipeline_dtype": torch.float32}
    return TransformerConfig(**{**values, **changes})


def block(**options):
    layer = get_gpt_layer_local_spec(**options)
    return TransformerBlockSubmodules(layer_specs=[layer] * 4, layer_norm=layer.submodules.input_layernorm)


def moe_block():
    model = config(num_moe_experts=2, moe_layer_freq=[0, 1, 0, 1], add_bias_linear=False)
    return model, get_gpt_decoder_block_spec(model, use_transformer_engine=False, pp_rank=0)


def roles(sites):
    return {site.role for site in sites}


def test_dense_layers_have_their_roles():
    editor = SpecEditor(block(), owner="a")
    expected = {"layer", "self_attention", "qkv", "proj", "core_attention", "mlp", "fc1", "fc2"}
    assert expected <= roles(editor.find())
    assert len(editor.find("core_attention")) == 4
    assert len(editor.find(*NORM_ROLES)) == 9


def test_identities_are_not_found_unless_asked_for():
    editor = SpecEditor(block(), owner="a")
    assert editor.find("q_layernorm", "k_layernorm") == []
    assert len(editor.find("q_layernorm", empty=True)) == 4
    assert all(site.spec is None for site in editor.find("activation", empty=True))


def test_query_and_key_norms_are_found_when_the_model_has_them():
    editor = SpecEditor(block(qk_layernorm=True), owner="a")
    assert len(editor.find("q_layernorm", "k_layernorm")) == 8


def test_multi_latent_attention_has_its_linears():
    editor = SpecEditor(block(multi_latent_attention=True, qk_layernorm=True), owner="a")
    found = roles(editor.find())
    assert {"q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "kv_layernorm"} <= found


def test_mixture_of_experts_layers_have_router_and_experts():
    _, spec = moe_block()
    editor = SpecEditor(spec, owner="a")
    # megatron-core 0.15 builds its router without a specification.
    specified = "router" in {field.name for field in fields(MoESubmodules)}
    routers = ["layers.1.mlp.router", "layers.3.mlp.router"] if specified else []
    assert [site.path for site in editor.find("router")] == routers
    assert len(editor.find("experts")) == len(editor.find("shared_experts")) == 2


def test_a_dotted_role_tells_dense_from_expert_linears():
    _, spec = moe_block()
    editor = SpecEditor(spec, owner="a")
    assert [site.path for site in editor.find("layer.mlp.fc1")] == [
        "layers.0.mlp.linear_fc1",
        "layers.2.mlp.linear_fc1",
    ]
    assert {site.path for site in editor.find("experts.fc1")} == {
        "layers.1.mlp.experts.linear_fc1",
        "layers.3.mlp.experts.linear_fc1",
    }


def test_multi_token_prediction_blocks_are_walked():
    model = config(mtp_num_layers=1)
    layer = get_mtp_layer_spec_for_backend(get_gpt_layer_local_spec(), LocalSpecProvider())
    spec = MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    editor = SpecEditor(spec, owner="a", config=model)
    assert {"enorm", "hnorm", "eh_proj", "final_layernorm", "core_attention"} <= roles(editor.find())
    assert [site.layer_number for site in editor.find("core_attention")] == [5]


def test_a_single_layer_is_a_tree():
    editor = SpecEditor(get_gpt_layer_local_spec(), owner="a")
    assert editor.replace("core_attention", Attention) == 1
    assert editor.spec.submodules.self_attention.submodules.core_attention.module is Attention


def test_the_original_tree_stays_as_it_was():
    original = block()
    SpecEditor(original, owner="a").replace(("core_attention", "final_layernorm"), Norm)
    attention = original.layer_specs[0].submodules.self_attention.submodules.core_attention
    assert attention is DotProductAttention
    assert original.layer_norm is not Norm


def test_one_layer_changes_alone_although_layers_share_their_specification():
    editor = SpecEditor(block(), owner="a", config=config())
    assert editor.replace("core_attention", Attention, layers=[3]) == 1
    modules = [site.spec.module for site in editor.find("core_attention")]
    assert modules == [DotProductAttention, DotProductAttention, Attention, DotProductAttention]


def test_layer_numbers_count_in_the_whole_model_under_pipeline_parallelism():
    model = config(pipeline_model_parallel_size=2)
    spec = get_gpt_decoder_block_spec(model, use_transformer_engine=False, pp_rank=1)
    editor = SpecEditor(spec, owner="a", config=model, pp_rank=1)
    assert [site.layer_number for site in editor.find("mlp")] == [3, 4]


def test_layers_cannot_be_selected_without_the_configuration():
    with pytest.raises(LayerSpecError, match="config="):
        SpecEditor(block(), owner="a").find("mlp", layers=[1])


def test_carry_keeps_submodules_and_params():
    editor = SpecEditor(block(), owner="a")

    class OwnMLP(MLP):
        pass

    editor.replace("mlp", lambda site: site.carry(OwnMLP, chunks=2))
    new = editor.find("mlp")[0].spec
    assert new.module is OwnMLP
    assert new.params == {"chunks": 2}
    assert new.submodules.linear_fc1 is not None


def test_a_replaced_parent_carries_its_replaced_children():
    editor = SpecEditor(block(), owner="a")
    editor.replace(("mlp", "fc1"), lambda site: site.carry(Norm))
    assert len([entry for entry in editor.history if entry.role == "fc1"]) == 4
    assert {site.spec.module for site in editor.find("mlp", "fc1")} == {Norm}


def test_a_function_may_leave_a_site_alone():
    editor = SpecEditor(block(), owner="a")
    count = editor.replace("mlp", lambda site: ModuleSpec(Norm) if site.path.startswith("layers.0") else None)
    assert count == 1


def test_empty_sites_are_filled_on_request():
    editor = SpecEditor(block(), owner="a")
    assert editor.replace("activation", Norm) == 0
    assert editor.replace("activation", Norm, empty=True) == 4
    mlp = as_spec(editor.spec.layer_specs[0].submodules.mlp)
    assert as_spec(mlp.submodules.activation_func).module is Norm


def test_a_second_feature_is_refused_and_told_about_the_first():
    first = SpecEditor(block(), owner="fused-norm")
    first.replace("input_layernorm", Norm)
    second = SpecEditor(first.spec, owner="other-norm")
    with pytest.raises(LayerSpecError, match="other-norm and fused-norm both replace input_layernorm"):
        second.replace("input_layernorm", OtherNorm)


def test_what_the_host_chose_is_free_to_be_replaced():
    host = SpecEditor(block(), owner="")
    host.replace("input_layernorm", Norm)
    feature = SpecEditor(host.spec, owner="a")
    assert feature.replace("input_layernorm", OtherNorm) == 4
    assert {(entry.owner, entry.old) for entry in feature.history} == {("a", "Norm")}


def test_the_same_feature_may_replace_again():
    editor = SpecEditor(block(), owner="a")
    editor.replace("input_layernorm", Norm)
    assert editor.replace("input_layernorm", OtherNorm) == 4


def test_a_wrapping_feature_is_accepted_and_recorded():
    first = SpecEditor(block(), owner="inner")
    first.replace("core_attention", Attention)
    second = SpecEditor(first.spec, owner="outer")
    second.replace("core_attention", lambda site: ModuleSpec(Norm, params={"inner": site.spec}), wrap=True)
    entries = [entry for entry in second.history if entry.path.startswith("layers.0")]
    assert [(entry.owner, entry.old, entry.new) for entry in entries] == [
        ("inner", "DotProductAttention", "Attention"),
        ("outer", "Attention", "Norm"),
    ]


def test_the_session_counts_what_was_placed():
    session = Placements()
    SpecEditor(block(), owner="a", session=session).replace("core_attention", Attention)
    assert session.counts == {"a": 4}


def test_the_session_knows_the_roles_that_were_sought_and_replaced():
    session = Placements()
    editor = SpecEditor(moe_block()[1], owner="a", session=session)
    editor.replace(("experts.fc1", "enorm"), Attention)
    assert session.roles.sought == {"experts.fc1", "enorm"}
    assert session.roles.replaced == {"layer.mlp.experts.fc1"}
    assert {"core_attention", "fc2", "router"} <= session.roles.present


def test_what_contains_the_module_that_was_there_replaces_no_role():
    session = Placements()
    editor = SpecEditor(block(), owner="a", session=session)
    editor.replace("core_attention", lambda site: ModuleSpec(Attention, params={"inner": 1}), wrap=True)
    assert session.roles.replaced == set()


def test_params_that_cannot_be_copied_are_refused_with_the_way_out():
    new = ModuleSpec(Attention, params={"group": (number for number in range(3))})
    with pytest.raises(LayerSpecError, match="function without arguments"):
        SpecEditor(block(), owner="a").replace("core_attention", new)


def test_a_function_in_params_travels_unchanged():
    def group():
        return "the group"

    editor = SpecEditor(block(), owner="a")
    editor.replace("core_attention", ModuleSpec(Attention, params={"group": group}))
    assert editor.find("core_attention")[0].spec.params["group"] is group


def test_something_else_than_a_tree_is_refused():
    with pytest.raises(LayerSpecError, match="no specification tree"):
        SpecEditor(IdentityOp, owner="a")


class Linear:
    pass


class CutTwice(Linear):
    linear_layout = LinearLayout("two-cuts", "[s / x, b, k / y]", "[s / y, b, n / x]")


class Beside:
    wraps = "inner"


class Features:
    """The part of a session that messages use."""

    plan = Plan(
        features=tuple(
            ActiveFeature(name, "acme", "1", "demo", 2, f"--{name}") for name in ("two-cuts", "adapter")
        )
    )

    def place(self, owner, count, **roles):
        pass


def beside(site):
    return site.wrap(Beside, rank=4)


def grown(site):
    return site.carry(type("Grown", (site.spec.module,), {}))


def edited(spec, owner, *change, **options):
    editor = SpecEditor(spec, owner=owner, session=Features())
    editor.replace("mlp.fc1", *change, **options)
    return editor.spec


@pytest.mark.parametrize("adapter", [beside, grown])
def test_a_wrapper_is_refused_around_a_linear_of_another_layout_with_the_way_out(adapter):
    spec = edited(block(), "two-cuts", CutTwice)
    with pytest.raises(LinearLayoutError) as caught:
        edited(spec, "adapter", adapter, wrap=True)

    text = str(caught.value)
    assert "adapter puts" in text
    assert "CutTwice of two-cuts there takes [s / x, b, k / y] and gives [s / y, b, n / x]" in text
    assert "drop --two-cuts or --adapter" in text
    assert isinstance(caught.value, UserError)


def test_a_linear_of_another_layout_is_refused_inside_of_a_wrapper_that_came_first():
    spec = edited(block(), "adapter", beside, wrap=True)
    with pytest.raises(LinearLayoutError, match="adapter puts Beside around fc1"):
        edited(spec, "two-cuts", CutTwice)


def test_wrappers_that_know_the_layout_or_add_nothing_to_its_shapes_are_fine():
    spec = edited(block(), "two-cuts", CutTwice)
    later = edited(spec, "later", grown, wrap=True, layouts=ANY_LAYOUT)
    with pytest.raises(LinearLayoutError):
        # A subclass is no less of that layout.
        edited(later, "adapter", beside, wrap=True)
    known = edited(later, "adapter", beside, wrap=True, layouts=("two-cuts",))

    assert edited(known, "two-cuts", CutTwice, wrap=True, layouts=ANY_LAYOUT)


def test_what_declares_to_wrap_is_passed_through_to_the_module_inside():
    spec = edited(block(), "adapter", beside, wrap=True)
    spec = edited(spec, "faster", Linear)
    editor = SpecEditor(spec, owner="")
    site = editor.find("fc1")[0]

    assert site.path == "layers.0.mlp.linear_fc1.inner"
    assert (site.spec.module, site.placed_by, site.wrapped_in) == (Linear, "faster", ("Beside",))
    outer = as_spec(as_spec(spec.layer_specs[0].submodules.mlp).submodules.linear_fc1)
    assert (outer.module, outer.params["rank"], outer.params["inner"].module) == (Beside, 4, Linear)
    assert [entry.owner for entry in editor.history[:2]] == ["faster", "adapter"]


def test_wrapping_with_a_class_that_does_not_say_what_it_wraps_is_refused():
    with pytest.raises(LayerSpecError, match="Linear has no attribute wraps"):
        edited(block(), "adapter", lambda site: site.wrap(Linear), wrap=True)
