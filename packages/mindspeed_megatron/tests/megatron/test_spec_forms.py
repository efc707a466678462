"""Specifications in the forms of newer megatron-cores: found, replaced and built like a ``ModuleSpec``."""

from __future__ import annotations

from functools import partial

import pytest
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from mindspeed_megatron.layer_sites import LayerSpecError
from mindspeed_megatron.layer_spec import SpecEditor
from mindspeed_megatron.spec_forms import as_spec, in_role


class Linear:
    pass


class OtherLinear:
    pass


class LayerMlp:
    """An MLP as megatron-core 0.18 has them: a layer builds it by its method."""

    @classmethod
    def as_mlp_submodule(cls, submodules, config, pg_collection, **further):
        return cls, submodules, config, pg_collection, further


class OtherMlp(LayerMlp):
    pass


def block(mlp):
    layer = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(mlp=mlp))
    return TransformerBlockSubmodules(layer_specs=[layer, layer])


@pytest.fixture
def experts():
    """A block of two layers whose experts are partial objects of classes."""
    inner = partial(SequentialMLP, submodules=MLPSubmodules(linear_fc1=Linear, linear_fc2=Linear))
    return block(partial(MoELayer, submodules=MoESubmodules(experts=inner)))


def test_a_partial_shows_class_arguments_and_submodules():
    inner = MLPSubmodules(linear_fc1=Linear, linear_fc2=Linear)
    spec = as_spec(partial(MLP, submodules=inner, is_expert=True))

    assert (spec.module, spec.params) == (MLP, {"is_expert": True})
    assert spec.submodules is inner


def test_a_partial_of_a_classs_method_shows_the_class():
    assert as_spec(partial(LayerMlp.as_mlp_submodule, submodules=None)).module is LayerMlp


@pytest.mark.parametrize("nothing", [None, IdentityOp, ModuleSpec(module=IdentityOp)])
def test_an_identity_is_nothing(nothing):
    assert as_spec(nothing) is None


def test_roles_inside_partials_are_found(experts):
    found = SpecEditor(experts, owner="").find("experts.fc1")

    assert [site.path for site in found] == [f"layers.{i}.mlp.experts.linear_fc1" for i in (0, 1)]
    assert {site.spec.module for site in found} == {Linear}


def test_a_change_inside_a_partial_leaves_the_tree_that_was_handed_in(experts):
    editor = SpecEditor(experts, owner="a")
    editor.replace("experts.fc1", ModuleSpec(module=OtherLinear))
    changed = editor.spec.layer_specs[0].submodules.mlp.keywords["submodules"].experts
    before = experts.layer_specs[0].submodules.mlp.keywords["submodules"].experts

    assert changed.keywords["submodules"].linear_fc1.module is OtherLinear
    assert before.keywords["submodules"].linear_fc1 is Linear


def test_a_second_feature_at_a_partials_place_is_refused(experts):
    editor = SpecEditor(experts, owner="a")
    editor.replace("experts", lambda site: site.carry(OtherMlp))
    with pytest.raises(LayerSpecError, match="a put OtherMlp there, b wants"):
        SpecEditor(editor.spec, owner="b").replace("experts", ModuleSpec(module=OtherLinear))


def test_a_layer_builds_a_replaced_mlp_by_its_method():
    given = block(partial(LayerMlp.as_mlp_submodule, submodules="inside"))
    editor = SpecEditor(given, owner="a")
    editor.replace("mlp", lambda site: site.carry(OtherMlp))
    built = editor.spec.layer_specs[1].submodules.mlp

    assert isinstance(built, ModuleSpec)
    assert built(config=1, pg_collection=2, name="mlp") == (OtherMlp, "inside", 1, 2, {"name": "mlp"})


def test_other_roles_are_built_by_their_constructor():
    spec = ModuleSpec(module=OtherMlp)

    assert in_role(spec, "experts") is spec
