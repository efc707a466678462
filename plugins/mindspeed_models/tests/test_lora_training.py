"""Adapters train beside a frozen base; their checkpoints hold them alone, and load beside that base alone."""

from pathlib import Path

import lora_runs as runs
import pytest

from mindspeed_testing import run_world
from mindspeed_train.interface import read_index

SHARDED = ("--use-distributed-optimizer",)


def alone(folder):
    """Train, save and load in one process."""
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
    found["refused"]["another step"] = runs.refusal(*runs.LORA, *loads, "--ckpt-step", "7")
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
        ("another step", ["--ckpt-step 7", "from the latest checkpoint of its folder"]),
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


def thorough(*value):
    return pytest.param(*value, marks=pytest.mark.thorough)


OVERLAPS = (*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
ZERO_BUBBLE = (*runs.PP2, "--pipeline-schedule", "zb-h1")
TIED = (
    *(flag for flag in runs.LORA if not flag.startswith("--untie")),
    *("--lora-modules-to-save", "embedding"),
)
EXPERTS = (
    *(*runs.BASE, "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-router-score-function", "sigmoid"),
    *("--moe-router-enable-expert-bias", "--lora-target-modules", "linear_qkv", "linear_proj"),
)
LATENT = (
    *(
        *runs.BASE,
        "--multi-latent-attention",
        "--q-lora-rank",
        "16",
        "--kv-lora-rank",
        "16",
    ),
    *("--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--rope-type", "rope"),
    *("--lora-target-modules", "linear_q_down_proj", "linear_kv_down_proj", "linear_q_up_proj"),
    *("--lora-r", "4"),
)
HEADS = ("--context-parallel-size", "2", "--context-parallel-algo", "ulysses_cp_algo")
HALF = (*runs.LORA, "--bf16")
LAYOUTS = {
    "tp2": (runs.LORA, runs.TP2),
    "zb-h1 overlapped": (runs.LORA, (*ZERO_BUBBLE, *OVERLAPS)),
    "latent tp2": (LATENT, runs.TP2),
    "zb-h1": (runs.LORA, ZERO_BUBBLE),
    "coc": (runs.LORA, (*runs.TP2, "--use-ascend-coc")),
    "tied pp2": (TIED, runs.PP2),
    "latent tp2 without sequences": (LATENT, runs.TP2[:2]),
    "latent pp2": (LATENT, runs.PP2),
    "latent zb-h1": (LATENT, ZERO_BUBBLE),
    "experts ep2": (EXPERTS, ("--expert-model-parallel-size", "2")),
    "vpp2": (runs.LORA, (*runs.PP2, "--num-layers-per-virtual-pipeline-stage", "1")),
    "vpp2, recomputed": (runs.LORA, (*runs.PP2, "--num-layers-per-virtual-pipeline-stage", "1", *runs.FULL)),
    "cp2": (runs.LORA, ("--context-parallel-size", "2", "--use-flash-attn")),
    "cp2, heads": (runs.LORA, (*HEADS, "--use-flash-attn")),
    "swap-attention": (runs.LORA, ("--swap-attention",)),
    "recompute-activation": (runs.LORA, ("--recompute-activation-function",)),
    "recompute-norm": (runs.LORA, ("--recompute-norm",)),
    "reuse-fp32-param": (HALF, ("--reuse-fp32-param",)),
    "reuse-fp32-param, sharded": (HALF, ("--reuse-fp32-param", *SHARDED)),
}
"""Models, and layouts in which they train as on two data-parallel ranks."""
IN_LAYOUTS = [*list(LAYOUTS)[:3], *map(thorough, list(LAYOUTS)[3:])]


def layouts(names):
    """Adapters of two data-parallel ranks, and the same ones in other layouts; what is refused."""
    found = {}
    for name in names:
        model, layout = LAYOUTS[name]
        if model not in found:
            with runs.course(*model) as run:
                initial = run.parameters()
                found[model] = run.train(3), initial
        expected, initial = found[model]
        with runs.course(*model, *layout, initial=initial) as run:
            trained, end = run.train(3), run.parameters()
        found[name] = expected, trained, end.drifted(), runs.distance(initial, end, adapters=False)
    found["tp-2d"] = runs.refusal(*runs.LORA, *runs.TP2, "--tp-2d", "--tp-x", "2", "--tp-y", "1")
    return {name: value for name, value in found.items() if isinstance(name, str)}


@pytest.fixture(scope="module")
def in_layouts(asked_for):
    return run_world(layouts, 2, [name for name in LAYOUTS if name in asked_for("name")], timeout=300)[0]


@pytest.mark.parametrize("name", IN_LAYOUTS)
def test_every_layout_trains_the_same_adapters(in_layouts, name):
    expected, trained, drifted, moved = in_layouts[name]
    assert trained == [pytest.approx(pair, rel=2e-5) for pair in expected]
    assert drifted == {}
    assert moved == 0.0 or name.startswith("tied")


def test_linears_with_other_parts_are_refused_by_name(in_layouts):
    said = in_layouts["tp-2d"]
    assert "lora puts" in said
    assert "(tp-2d)" in said


def elsewhere(folder):
    """Adapters that two data-parallel ranks saved, on two tensor-parallel ranks; masks of dropout there."""
    with runs.course(*runs.BASE, "--save", f"{folder}/base") as run:
        run.save()
    loads = ("--load", f"{folder}/base")
    found = {}
    with runs.course(*runs.LORA, *loads, "--save", f"{folder}/adapter", *SHARDED) as run:
        run.train(2)
        run.save()
        found["goes on"] = run.train(2)
    goes_on = (*runs.LORA, *loads, "--lora-load", f"{folder}/adapter", *SHARDED, *runs.TP2)
    with runs.course(*goes_on) as run:
        found["goes on at tp2"] = run.train(2)
    with runs.course(*runs.LORA, *loads, *runs.TP2, "--lora-dropout", "0.5") as run:
        found["dropout"] = run.train(2), run.parameters().drifted()
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    return run_world(elsewhere, 2, str(tmp_path_factory.mktemp("layouts")), timeout=300)[0]


def test_adapters_go_on_in_another_layout(resumed):
    assert resumed["goes on at tp2"] == [pytest.approx(pair, rel=1e-5) for pair in resumed["goes on"]]


def test_masks_of_dropout_leave_copies_of_adapters_alike(resumed):
    losses, drifted = resumed["dropout"]
    assert drifted == {}
    assert losses[0] != losses[1]
