"""The weight table: permutations of rows that are their own proof, and every family's names."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_logits import undescribed

from mindspeed_models.families import families, named_model
from mindspeed_models.model_names import family_names
from mindspeed_models.recipe import ModelPlan, RecipeError
from mindspeed_models.weights.table import QKV, Cat, Copy, Entry, WPack, clip
from mindspeed_testing import run_world

SUPPORTED = [name for name, recipe in families().items() if not recipe.refused]


def test_the_help_names_every_family_that_is_supported():
    assert family_names() == SUPPORTED


def plan(groups, repeat, size):
    heads = groups * repeat
    return ModelPlan(
        "any",
        {
            "num_layers": 1,
            "hidden_size": heads * size,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": size,
        },
    )


SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))


def sources(transform, made, columns=3):
    """Return one tensor for each source, with another number in every element."""
    q, kv = made.heads * made.head_dim, made.groups * made.head_dim
    rows = {QKV: (q, kv, kv), WPack: (q + 2 * kv,), Cat: (q, q), Copy: (q,)}[type(transform)]
    count = sum(rows) * columns
    return list(torch.arange(count).reshape(-1, columns).split(list(rows)))


@settings(max_examples=40, deadline=None)
@given(SIZES, st.sampled_from([Copy(), Cat(), QKV(), WPack()]), st.data())
def test_rows_go_there_and_back_and_any_part_of_them_is_the_same(sizes, transform, data):
    made = plan(*sizes)
    tensors = sources(transform, made)
    entry = Entry("key", tuple(map(str, range(len(tensors)))), transform)
    whole = entry.forward(tensors, made)
    assert sorted(whole.flatten().tolist()) == list(range(whole.numel()))
    assert all(map(torch.equal, entry.inverse(whole, made), tensors))
    assert entry.shape([each.shape for each in tensors]) == tuple(whole.shape)
    assert entry.source_shapes(whole.shape, made) == [tuple(each.shape) for each in tensors]
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    parts = entry.rows(start, stop, len(whole), made)
    read = [tensors[each.source][each.start : each.stop] for each in parts]
    assert torch.equal(torch.cat(read) if read else whole[:0], whole[start:stop])


def test_heads_of_a_group_are_neighbours_whatever_the_parallel_size():
    made = plan(2, 2, 1)
    order = [(each.source, each.start, each.stop) for each in QKV().segments(8, made)]
    assert order == [(0, 0, 2), (1, 0, 1), (2, 0, 1), (0, 2, 4), (1, 1, 2), (2, 1, 2)]
    assert clip(QKV().segments(8, made), 1, 3)[0].start == 1


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_size_has_a_plan_a_table_and_a_way_back(name):
    recipe = families()[name]
    for size, config in recipe.sizes.items():
        made = recipe.make_plan(config)
        again = recipe.make_plan({**recipe.config(made)})
        assert again.arguments == made.arguments, size
        small = made.replaced(
            {"num_layers": min(made.layers, 3), "num_experts": min(made.experts, 2) or None}
        )
        if isinstance(small.arguments.get("moe_layer_freq"), list):
            small = small.replaced({"moe_layer_freq": small.arguments["moe_layer_freq"][:3]})
        entries = recipe.entries(small)
        names = [source for entry in entries.values() for source in entry.sources]
        assert len(set(names)) == len(names) > 8, size
        assert len({key for key, _ in entries}) > 5


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_family_trains_without_dropout_where_its_files_do_not_say_it(name):
    recipe = families()[name]
    defaults = recipe.make_plan(recipe.sizes["tiny"]).defaults
    assert (defaults["attention_dropout"], defaults["hidden_dropout"]) == (0.0, 0.0)
    assert defaults["max_position_embeddings"] > 0


def test_models_are_found_by_any_spelling():
    assert named_model("llama3-8b")[0].name == "llama3"
    assert named_model("Llama-2-7B")[0].name == "llama2"
    assert named_model("qwen3_moe-30b-a3b")[0].name == "qwen3-moe"
    assert named_model("Qwen2.5-7B")[0].name == "qwen2.5"
    assert named_model("llama3-3.1-8b")[1]["rope_scaling"]["factor"] == 8.0
    assert named_model("qwen3")[1] is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lama3-8b", ["no such model", "did you mean 'llama3-8b'"]),
        ("llama3-9b", ["has no size '9b'", "it has tiny, 8b"]),
        ("gemma2-9b", ["not supported", "alternate"]),
    ],
)
def test_unknown_models_are_refused_with_the_nearest(name, said):
    with pytest.raises(RecipeError) as error:
        named_model(name)
    assert all(each in str(error.value) for each in (name, *said))


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        (
            "llama3",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
            "low_freq_factor",
        ),
        ("llama", {"num_key_value_heads": 3}, "does not divide"),
        ("llama", {"num_hidden_layers": "four"}, "num_hidden_layers is 'four'"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"use_sliding_window": True}, "no kernel"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "of 4 experts"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "group_limited_greedy"),
        (
            "deepseek-v2",
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            "does not divide the 4 experts",
        ),
        (
            "deepseek-v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1},
            "in which 2 of 4 experts are chosen",
        ),
        ("deepseek-v3", {"norm_topk_prob": False}, "sigmoid"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
    ],
)
def test_configurations_that_no_model_here_computes_are_refused(family, change, said):
    recipe = families()[family]
    with pytest.raises(RecipeError, match=r"config\.json") as error:
        recipe.make_plan({**recipe.sizes["tiny"], **change})
    assert said in str(error.value)


@pytest.mark.thorough
def test_modules_that_predict_further_on_are_in_the_table(tmp_path):
    recipe = families()["deepseek-v3"]
    config = {**recipe.sizes["tiny"], "num_nextn_predict_layers": 1, "model_type": "deepseek_v3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run_world(undescribed, 1, str(tmp_path)) == [([], [])]
    entries = recipe.entries(recipe.make_plan(config)).values()
    names = {name for entry in entries for name in (*entry.sources, *entry.repeats)}
    assert {
        f"model.layers.2.{each}.weight" for each in ("embed_tokens", "eh_proj", "shared_head.head")
    } <= names
