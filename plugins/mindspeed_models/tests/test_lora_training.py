"""Adapters train beside a frozen base; their checkpoints hold them alone, and load beside that base alone."""

from pathlib import Path

import lora_runs as runs
import pytest

from mindspeed_testing import run_world
from mindspeed_train.interface import read_index

SHARDED = ("--use-distributed-optimizer",)


def alone(folder):
    """What one process trains, saves and loads."""
    found = {}
    with runs.course(*runs.BASE, "--save", f"{folder}/base") as base:
        base.train(1)
        base.save()
    loads = ("--load", f"{folder}/base")
    with runs.course(*runs.BASE, *loads, "--finetune") as base:
        found["base losses"] = base.train(1)
    with runs.course(*runs.LORA, *loads, "--save", f"{folder}/adapter") as run:
        before = run.parameters()
        found["losses"] = run.train(2)
        found["trained"] = run.trained()
        run.save()
        found["losses"] += run.train(2)
        after = run.parameters()
        found["base moved"] = runs.distance(before, after, adapters=False)
        found["adapters moved"] = runs.distance(before, after, adapters=True)
        found["drifted"] = after.drifted()
    (step,) = Path(folder, "adapter").glob("iter_*")
    keys = read_index(step).tensors
    found["saved"] = sorted({key.rpartition(".")[2] for key in keys if not key.startswith("optimizer")})
    goes_on = (*runs.LORA, *loads, "--lora-load", f"{folder}/adapter")
    with runs.course(*goes_on) as run:
        found["resumed"] = run.train(2)
        found["resumed differs"] = runs.distance(after, run.parameters(), adapters=True)
        found["said"] = run.said
    with runs.course(
        *runs.LORA, "--pretrained-checkpoint", f"{folder}/base", "--load", f"{folder}/adapter"
    ) as run:
        found["resumed otherwise"] = run.train(2)
    with runs.course(*runs.BASE, "--seed", "7", "--save", f"{folder}/other") as other:
        other.save()
    other = ("--pretrained-checkpoint", f"{folder}/other")
    adapter = ("--load", f"{folder}/adapter")
    found["refused"] = {
        "another base": runs.refusal(*runs.LORA, *other, *adapter),
        "another base, finetuned": runs.refusal(*runs.LORA, *other, *adapter, "--finetune"),
        "no base": runs.refusal(*runs.LORA, *adapter),
        "no adapter": runs.refusal(*runs.LORA, *loads, "--lora-load", f"{folder}/other"),
        "three folders": runs.refusal(*runs.LORA, *other, *adapter, "--lora-load", f"{folder}/other"),
        "another factor": runs.refusal(*goes_on, "--lora-alpha", "8"),
        "another rank": runs.refusal(*goes_on, "--lora-r", "8"),
        "without the feature": runs.refusal(*runs.BASE, "--load", f"{folder}/adapter"),
    }
    with runs.course(*runs.LORA, *loads, *runs.FULL) as run:
        found["recomputed"] = run.train(2)
    with no_hook():
        found["no hook"] = runs.refusal(*runs.LORA, *loads, *runs.FULL, steps=1)
    saved = ("--lora-modules-to-save", "word_embeddings", "output_layer")
    with runs.course(*runs.LORA, *loads, *saved, "--save", f"{folder}/whole") as run:
        before = run.parameters()
        run.train(1)
        after = run.parameters()
        found["whole"] = {key for key in after.tensors if not before.tensors[key].equal(after.tensors[key])}
        run.save()
        found["whole losses"] = run.train(2)
    with runs.course(*runs.LORA, *loads, *saved, "--lora-load", f"{folder}/whole") as run:
        found["whole resumed"] = run.train(2)
    half = ("--bf16", "--lora-dtype", "fp32", *SHARDED)
    with runs.course(*runs.LORA, *half) as run:
        found["fp32"] = (
            run.train(2),
            {str(p.dtype) for chunk in run.run.model for p in chunk.parameters() if p.requires_grad},
        )
    return found


class no_hook:
    """Leave outputs of the embedding as they are."""

    def __enter__(self):
        from mindspeed_models.lora import trained

        self.module, self.kept = trained, trained.let_inputs_learn
        trained.let_inputs_learn = lambda chunks, modules=(): None

    def __exit__(self, *error):
        self.module.let_inputs_learn = self.kept


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_world(alone, 1, str(tmp_path_factory.mktemp("runs")), timeout=300)[0]


def test_the_first_step_has_the_loss_of_the_base(found):
    assert found["losses"][0][0] == found["base losses"][0][0]
    assert len(set(found["losses"])) == 4


def test_the_base_keeps_every_bit(found):
    assert found["base moved"] == 0.0
    assert found["adapters moved"] > 0.0


def test_gradient_buffers_and_optimizer_hold_what_is_trained_alone(found):
    # 4 layers of width 64, rank 4: A and B of qkv (64, 192), proj (64, 64), fc1 (64, 2 · 128), fc2 (128, 64).
    expected = 4 * 4 * (64 + 192 + 64 + 64 + 64 + 256 + 128 + 64)
    assert found["trained"] == (expected, expected, expected)


def test_a_checkpoint_holds_adapters_alone(found):
    assert found["saved"] == ["lora_A", "lora_B"]


def test_a_run_goes_on_bit_for_bit_by_either_pair_of_flags(found):
    assert found["resumed"] == found["losses"][2:]
    assert found["resumed differs"] == 0.0
    assert found["resumed otherwise"] == found["losses"][2:]


def test_another_base_is_refused_by_its_digest(found):
    for case in ("another base", "another base, finetuned", "no base"):
        said = found["refused"][case]
        assert "its adapters were trained beside" in said, case
        assert "--pretrained-checkpoint" in said


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("no adapter", ["--lora-load", "neither a checkpoint of adapters nor a peft directory"]),
        ("three folders", ["--lora-load", "--pretrained-checkpoint", "drop one of the two"]),
        ("another factor", ["lora_alpha 32.0 (checkpoint) / 8.0 (this run)"]),
        ("another rank", ["lora_r 4 (checkpoint) / 8 (this run)"]),
        ("without the feature", ["lora"]),
    ],
)
def test_adapters_that_do_not_fit_are_refused(found, case, texts):
    for text in texts:
        assert text in found["refused"][case]


def test_layers_that_are_recomputed_learn_alike(found):
    assert found["recomputed"] == [pytest.approx(pair, rel=1e-6) for pair in found["losses"][:2]]


def test_a_gradient_that_never_arrives_stops_the_first_step(found):
    assert "no adapter got a gradient in the first step" in found["no hook"]
    assert "--lora-register-forward-hook" in found["no hook"]


def test_modules_to_save_train_and_are_saved_whole(found):
    moved = {key for key in found["whole"] if not runs.is_adapter(key)}
    assert moved == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert found["whole resumed"] == found["whole losses"]


def test_adapters_are_float32_beside_a_smaller_base_where_asked(found):
    losses, dtypes = found["fp32"]
    assert dtypes == {"torch.float32"}
    assert losses[0] != losses[1]


def layouts(folder):
    """Adapters of one layout in another, and the gradients that pipelines put off."""
    with runs.course(*runs.BASE) as run:
        initial = run.parameters()
    found = {}
    zero_bubble = (*runs.PP2, "--pipeline-schedule", "zb-h1")
    overlapped = (*zero_bubble, *SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
    for name, layout in {
        "dp2": (),
        "tp2": runs.TP2,
        "zb-h1": zero_bubble,
        "zb-h1 overlapped": overlapped,
        "coc": (*runs.TP2, "--use-ascend-coc"),
    }.items():
        with runs.course(*runs.LORA, *layout, initial=initial) as run:
            found[name] = run.train(3)
            found[name, "drifted"] = run.parameters().drifted()
    with runs.course(*runs.BASE, "--save", f"{folder}/base", initial=initial) as run:
        run.save()
    loads = ("--load", f"{folder}/base")
    with runs.course(*runs.LORA, *loads, "--save", f"{folder}/adapter", *SHARDED) as run:
        run.train(2)
        run.save()
        found["goes on"] = run.train(2)
    with runs.course(*runs.LORA, *loads, "--lora-load", f"{folder}/adapter", *SHARDED, *runs.TP2) as run:
        found["goes on at tp2"] = run.train(2)
    tied = tuple(flag for flag in runs.LORA if not flag.startswith("--untie"))
    with runs.course(*tied) as run:
        tied_initial = run.parameters()
    for name, layout in {"tied dp2": (), "tied pp2": runs.PP2}.items():
        with runs.course(*tied, *layout, "--lora-modules-to-save", "embedding", initial=tied_initial) as run:
            found[name] = run.train(2)
    experts = (*runs.BASE, "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32")
    experts += (
        "--lora-target-modules",
        "linear_qkv",
        "linear_proj",
        "--moe-token-dispatcher-type",
        "alltoall",
    )
    experts += ("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias")
    with runs.course(*experts) as run:
        expert_initial = run.parameters()
    for name, layout in {"experts": (), "experts ep2": ("--expert-model-parallel-size", "2")}.items():
        with runs.course(*experts, *layout, initial=expert_initial) as run:
            found[name] = run.train(2)
            found[name, "moved"] = runs.distance(expert_initial, run.parameters(), adapters=False)
    found["tp-2d"] = runs.refusal(*runs.LORA, *runs.TP2, "--tp-2d", "--tp-x", "2", "--tp-y", "1")
    found["dropout"] = []
    for layout in ((), runs.TP2):
        with runs.course(*runs.LORA, *layout, "--lora-dropout", "0.5", initial=initial) as run:
            found["dropout"].append(run.train(2))
            found["dropout", bool(layout)] = run.parameters().drifted()
    return found


@pytest.fixture(scope="module")
def in_layouts(tmp_path_factory):
    return run_world(layouts, 2, str(tmp_path_factory.mktemp("layouts")), timeout=300)[0]


@pytest.mark.parametrize("name", ["tp2", "zb-h1", "zb-h1 overlapped", "coc"])
def test_linears_of_other_features_are_adapted_like_plain_ones(in_layouts, name):
    assert in_layouts[name] == [pytest.approx(pair, rel=2e-5) for pair in in_layouts["dp2"]]
    assert in_layouts[name, "drifted"] == {}


def test_adapters_go_on_in_another_layout(in_layouts):
    assert in_layouts["goes on at tp2"] == [pytest.approx(pair, rel=1e-5) for pair in in_layouts["goes on"]]


def test_a_tied_embedding_that_is_saved_whole_trains_alike_on_both_of_its_stages(in_layouts):
    assert in_layouts["tied pp2"] == [pytest.approx(pair, rel=1e-5) for pair in in_layouts["tied dp2"]]


def test_experts_and_the_biases_of_their_routers_stay_as_they_are(in_layouts):
    assert in_layouts["experts ep2"] == [pytest.approx(pair, rel=1e-5) for pair in in_layouts["experts"]]
    assert (in_layouts["experts", "moved"], in_layouts["experts ep2", "moved"]) == (0.0, 0.0)


def test_linears_with_other_parts_are_refused_by_name(in_layouts):
    said = in_layouts["tp-2d"]
    assert "lora" in said
    assert "tp-2d" in said


def test_masks_of_dropout_leave_copies_of_adapters_alike(in_layouts):
    assert in_layouts["dropout", True] == {}
    assert in_layouts["dropout"][0] != in_layouts["dropout"][1]
