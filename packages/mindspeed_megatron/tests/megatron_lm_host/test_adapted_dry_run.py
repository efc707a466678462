"""Dry runs of a Megatron-LM script: its bytes and calls are those of a world that computes."""

from __future__ import annotations

import fake_training as fake
import pytest

from mindspeed_testing.dry_run import differences, followed_run
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

LENGTH = ("--train-iters", "2", "--eval-iters", "0", "--use-cpu-initialization")
PADDED_EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--expert-model-parallel-size", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-expert-capacity-factor", "1.0"),
    *("--moe-pad-expert-input-to-capacity", "--disable-bias-linear", "--swiglu"),
)
FUSED = (
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--use-flash-attn", "--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb"),
)
ROTARY = ("--position-embedding-type", "rope")
LATENT = (
    *("--multi-latent-attention", "--normalization", "RMSNorm", "--disable-bias-linear", *ROTARY),
    "--untie-embeddings-and-output-weights",
)
LAYOUTS = {
    "distributed optimizer": ("--use-distributed-optimizer", "--bf16", "--overlap-grad-reduce"),
    "tensor and sequence": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "pipeline": ("--pipeline-model-parallel-size", "2"),
}
FURTHER = {
    "two replicas": (),
    "interleaved": (
        *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
        *("--num-layers", "4", "--micro-batch-size", "1"),
    ),
    "split sequence": ("--context-parallel-size", "2", *ROTARY),
    "full recompute": (
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "padded experts": PADDED_EXPERTS,
    "fused kernels": FUSED,
    "latent attention": LATENT,
    "further tokens": ("--mtp-num-layers", "1", *ROTARY),
}


def follow_all(platform, layouts, features):
    declarations = every_feature() if features else ()
    found = []
    for flags in layouts.values():
        found.append(follow(platform, declarations, *flags))
        fake.forget_run()
    return found


def every_feature():
    from mindspeed_cp.features import DECLARATIONS as SEQUENCES
    from mindspeed_kernels.features import DECLARATIONS as KERNELS

    return (*SEQUENCES, *KERNELS)


def follow(platform, declarations, *flags):
    with followed_run(platform) as followed:
        fake.adapt(*declarations, extra=followed.plugins)
        ended = fake.run_script("--platform", platform, *fake.GPT, *LENGTH, *flags)
    assert ended["status"] == 0, ended["out"] + ended["err"]
    return followed.measured


def measure(layouts, *, features):
    sides = [run_world(follow_all, 2, name, layouts, features, timeout=400) for name in ("cpu", "fake")]
    return dict(zip(layouts, zip(*(zip(*ranks) for ranks in sides))))


@pytest.fixture(scope="module")
def measured(asked_for):
    asked = asked_for("layout")
    return measure({name: flags for name, flags in LAYOUTS.items() if name in asked}, features=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dry_run_has_the_bytes_and_calls_of_the_real_one(measured, layout):
    computed, planned = measured[layout]

    assert differences(computed, planned) == []
    assert computed[0].calls


@pytest.fixture(scope="module")
def measured_further():
    return measure(FURTHER, features=True)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", FURTHER)
def test_a_dry_run_of_a_further_layout_is_right_too(measured_further, layout):
    computed, planned = measured_further[layout]

    assert differences(computed, planned) == []
    assert computed[0].calls


def plan_alone(folder):
    import os

    os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE"), os.environ.pop("LOCAL_RANK")
    fake.adapt()
    place = ("--platform", "fake", "--fake-world-size", "4", "--fake-rank", "3")
    files = ("--load", f"{folder}/old", "--save", f"{folder}/new", "--save-interval", "1")
    layout = ("--tensor-model-parallel-size", "2", *fake.GPT, *LENGTH)
    found = {"whole": fake.run_script(*place, *files, *layout)}
    fake.forget_run()
    found["weights"] = fake.run_script(
        *place, *files, *layout, "--no-load-optim", "--no-use-checkpoint-opt-param-scheduler"
    )
    fake.forget_run()
    os.environ["WORLD_SIZE"] = "8"
    found["contradiction"] = fake.run_script(*place, *layout)
    os.environ.pop("WORLD_SIZE")
    script = fake.changed_script(
        fake.Path(folder) / "pretrain_by_data.py",
        [("    return GPTModel(", "    torch.rand(4).argmax().item()\n    return GPTModel(")],
    )
    found["data"] = fake.run_script(*place, *layout, script=script)
    return found, sorted(path.name for path in fake.Path(folder).iterdir())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_world(plan_alone, 1, str(tmp_path_factory.mktemp("alone")))[0]


def test_checkpoints_are_counted_and_left_alone(alone):
    found, files = alone

    assert files == ["pretrain_by_data.py"]
    assert "old was not read: " in found["whole"]["out"]
    assert "new was not written: " in found["whole"]["out"]


def test_weights_alone_are_a_third_of_a_checkpoint_of_adam(alone):
    whole, weights = (_bytes_read(alone[0][name]["out"]) for name in ("whole", "weights"))

    assert whole == pytest.approx(3 * weights, rel=0.01)


def _bytes_read(text):
    return int(text.split("was not read: ")[1].split(" bytes")[0].replace(",", ""))


def test_a_variable_of_the_launcher_that_contradicts_a_flag_is_refused_in_one_sentence(alone):
    refused = alone[0]["contradiction"]

    assert refused["status"] == 1
    assert "--fake-world-size 4: the launcher says WORLD_SIZE=8" in refused["err"]


def test_a_model_that_depends_on_data_is_refused_with_the_place(alone):
    refused = alone[0]["data"]

    assert refused["status"] == 1
    assert "the model depends on data, which a dry run does not have: " in refused["err"]
    assert "pretrain_by_data.py:" in refused["err"]
