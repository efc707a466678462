"""Needs while the model is built: specifications, chunks, built instances, data parallelism."""

import pytest
import torch
from toy_training import PP2, distance, gradients, losses, parameters, step, training

from mindspeed_core.errors import UserError
from mindspeed_testing import WorldError, run_world

VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "1", "--untie-embeddings-and-output-weights")


def replaced():
    with training("--toy-groups", "--toy-attention-scale", "2.0", *PP2) as run:
        decoder = run.model[0].module.decoder
        scaled = {
            layer.layer_number: type(layer.self_attention.core_attention).__name__ for layer in decoder.layers
        }
        options = [
            layer.self_attention.core_attention.options.factor
            for layer in decoder.layers
            if hasattr(layer.self_attention.core_attention, "options")
        ]
        norm = decoder.final_layernorm
        trained = losses(run)
        return scaled, options, norm is not None and len(norm._forward_hooks), run.session.placements, trained


def test_modules_are_replaced_by_role_in_layers_of_the_whole_model():
    results = run_world(replaced, 2)
    plain, scaled = "DotProductAttention", "ScaledAttention"
    assert results[0][0] == {1: plain, 2: plain}
    assert results[1][0] == {3: scaled, 4: scaled}
    assert [result[1] for result in results] == [[], [2.0, 2.0]]
    assert [result[2] for result in results] == [False, 1]
    # Every rank edits the tree of its chunk; the final norm is in each of them.
    assert results[0][3]["toy-attention-scale"] >= 1
    assert results[0][4] == results[1][4]


def scaling_takes_part_in_training():
    with training("--toy-groups") as run:
        initial = parameters(run)
        plain = losses(run, 1)
    with training("--toy-groups", "--toy-attention-scale", "1.0", initial=initial) as run:
        same = losses(run, 1)
    with training("--toy-groups", "--toy-attention-scale", "3.0", initial=initial) as run:
        other = losses(run, 1)
    return plain, same, other


def test_a_replaced_module_computes_what_its_options_say():
    ((plain, same, other),) = run_world(scaling_takes_part_in_training, 1)
    assert same == plain
    assert other != plain


def v_shape():
    with training(*PP2, *VIRTUAL) as run:
        initial = parameters(run)
        plain = losses(run)
        trained = parameters(run)
    with training(*PP2, *VIRTUAL, "--toy-v-shape", initial=initial) as run:
        chunks = [chunk.module for chunk in run.model]
        places = [(chunk.pre_process, chunk.post_process) for chunk in chunks]
        numbers = [[layer.layer_number for layer in chunk.decoder.layers] for chunk in chunks]
        same = losses(run)
        return places, numbers, plain, same, distance(trained, parameters(run)), run.session.plan.names


def test_chunks_are_built_for_another_global_stage_and_train_the_same_model():
    first, second = run_world(v_shape, 2)
    assert first[0] == [(True, False), (False, True)]
    assert second[0] == [(False, False), (False, False)]
    assert first[1] == [[1], [4]]
    assert second[1] == [[2], [3]]
    assert first[3] == pytest.approx(first[2], rel=1e-6)
    assert second[3] == first[3]
    assert first[4] < 1e-5
    assert first[5] == ("toy-sequential-schedule", "toy-v-shape")


def instance():
    with training(*PP2, *VIRTUAL) as run:
        initial = parameters(run)
        plain = losses(run, 1)
    with training(*PP2, *VIRTUAL, "--toy-embedding-scale", "1.0", initial=initial) as run:
        same = losses(run, 1)
    with training(*PP2, *VIRTUAL, "--toy-embedding-scale", "8.0", initial=initial) as run:
        other = losses(run, 1)
        stages = [chunk.module.vp_stage for chunk in run.model]
        changed = [(change.type_name, change.attribute) for change in run.session.instances.listing()]
        chunks = [chunk.module for chunk in run.model]
    left = [
        name for chunk in chunks for module in chunk.modules() for name in vars(module) if name == "forward"
    ]
    return plain, same, other, stages, changed, left


def test_a_built_instance_is_changed_for_the_session_only():
    first, second = run_world(instance, 2)
    assert first[1] == first[0]
    assert first[2] != first[0]
    assert first[3] == second[3] == [0, 1]
    assert first[4] == [("VocabParallelEmbedding", "forward")]
    assert second[4] == []
    assert first[5] == second[5] == []


def half_precision_instance():
    with training("--bf16", "--toy-embedding-scale", "2.0") as run:
        return (
            [chunk.module.vp_stage for chunk in run.model],
            len(run.session.instances.listing()),
            losses(run, 1),
        )


def test_half_precision_models_carry_their_stage_and_their_changes():
    ((stages, changes, trained),) = run_world(half_precision_instance, 1)
    assert stages == [None]
    assert changes == 1
    assert trained[0] > 0


def without_match():
    with training("--toy-watch-experts"):
        pass


def test_a_feature_that_matches_no_module_is_an_error():
    with pytest.raises(WorldError, match="toy-watch-experts: active, but matched no module") as caught:
        run_world(without_match, 2)
    assert "looked for experts; there are core_attention fc1" in str(caught.value)


def experts():
    mixture = ("--toy-experts", "4", "--toy-watch-experts", "--disable-bias-linear")
    with training(*mixture) as run:
        initial = parameters(run)
        alone = losses(run)
        trained = parameters(run)
    with training(*mixture, "--toy-expert-parallel", "2", initial=initial) as run:
        spread = losses(run)
        found = parameters(run)
        mlp = run.model[0].module.decoder.layers[0].mlp
        placed = run.session.placements["toy-watch-experts"]
        return alone, spread, distance(trained, found), mlp.num_local_experts, placed


def test_a_feature_brings_experts_whose_modules_and_groups_others_find():
    for alone, spread, difference, local, placed in run_world(experts, 2):
        assert spread == pytest.approx(alone, rel=1e-5)
        assert difference < 1e-4
        assert local == 2
        assert placed == 4


def buckets():
    with training("--overlap-grad-reduce") as run:
        initial = parameters(run)
        one = len(run.model[0].buffers[0].buckets)
        step(run)
        expected = gradients(run)
    with training("--overlap-grad-reduce", "--toy-bucket-size", "20000", initial=initial) as run:
        several = len(run.model[0].buffers[0].buckets)
        step(run)
        return one, several, distance(expected, gradients(run))


def test_options_of_data_parallelism_reach_the_gradient_buckets():
    for one, several, difference in run_world(buckets, 2):
        assert one == 1
        assert several > 4
        assert difference < 1e-6


def inference():
    with training() as run:
        weights = parameters(run)
    with training("--toy-embedding-scale", "1.0", initial=weights, mode="inference") as run:
        tokens = torch.arange(32).unsqueeze(0)
        with torch.no_grad():
            logits = run.model[0](tokens, tokens, None)
        return run.optimizer, run.data, run.model[0].training, tuple(logits.shape), run.session.plan.mode


def test_an_inference_session_has_a_model_with_features_and_nothing_to_train():
    ((optimizer, data, in_training, shape, mode),) = run_world(inference, 1)
    assert optimizer is None
    assert data is None
    assert not in_training
    assert shape == (1, 32, 128)
    assert mode == "inference"


BESIDE = ("--toy-beside", "2")
FIRST = (*BESIDE, "--toy-beside-first")
TP2 = ("--tensor-model-parallel-size", "2")


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ((*PP2, "--pipeline-schedule", "zb-h1", *BESIDE), 2),
        pytest.param((*PP2, "--pipeline-schedule", "zb-h1", *FIRST), 2, marks=pytest.mark.thorough),
        pytest.param(
            (*TP2, "--sequence-parallel", "--use-ascend-coc", *FIRST), 2, marks=pytest.mark.thorough
        ),
        pytest.param((*TP2, "--use-ascend-coc", *BESIDE), 2, marks=pytest.mark.thorough),
    ],
    ids=["zb-h1", "zb-h1-first", "coc-first", "coc"],
)
def test_a_product_beside_a_linear_trains_whatever_the_linear_is(flags, ranks, mindspeed_equivalence):
    mindspeed_equivalence(flags, BESIDE, world_size=ranks, baseline_world_size=1, steps=2, tolerance=1e-4)


def put_off():
    """Return the classes of the linears inside of wrappers, of the wrappers, and what the schedule left."""
    from mindspeed_pp.weight_gradients import WeightGradients

    with training(*PP2, "--pipeline-schedule", "zb-h1", *BESIDE) as run:
        linear = run.model[0].module.decoder.layers[0].mlp.linear_fc1
        losses(run)
        return type(linear.inner).__name__, type(linear).__name__, run.session.state(WeightGradients).seen


@pytest.mark.thorough
def test_weight_gradients_inside_of_a_declared_wrapper_are_put_off():
    for inner, wrapper, seen in run_world(put_off, 2):
        assert (inner, wrapper) == ("LaterColumnParallelLinear", "BesideLinear")
        assert seen > 0


def grids():
    """Return what is said about an adapter around linears whose weights are cut twice, in both orders."""
    said = []
    for flags in (BESIDE, FIRST):
        try:
            with training(*TP2, "--tp-2d", "--tp-x", "2", "--tp-y", "1", *flags):
                pass
        except Exception as error:
            said.append((isinstance(error, UserError), str(error)))
    return said


def test_an_adapter_beside_a_grid_is_refused_with_both_names_and_the_way_out():
    for said in run_world(grids, 2):
        assert [mendable for mendable, _ in said] == [True, True]
        for (_, text), flag in zip(said, ("--toy-beside", "--toy-beside-first"), strict=True):
            assert "Column2D of tp-linear there takes [s / x, b, k / y]" in text
            assert f"drop --tp-2d or {flag}" in text
