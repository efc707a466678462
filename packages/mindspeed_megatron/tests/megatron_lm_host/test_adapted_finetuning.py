"""Adapters and the ends of models in Megatron-LM's scripts: as in one process, saved alone and resumed."""

import fake_training as fake
import pytest

from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.feature import hookimpl
from mindspeed_models.features import DECLARATIONS
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

MODEL = (
    *("--platform", "cpu", "--use-cpu-initialization", "--disable-bias-linear", "--swiglu"),
    *(
        "--normalization",
        "RMSNorm",
        "--position-embedding-type",
        "rope",
        "--untie-embeddings-and-output-weights",
    ),
)
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
LORA = (
    "--lora-target-modules",
    "query_key_value",
    "dense",
    "dense_h_to_4h",
    "dense_4h_to_h",
    "--lora-r",
    "4",
)
KINDS = {
    "lora": LORA,
    "head": ("--lm-norm-weight",),
    "embedding": ("--embed-layernorm",),
    "z-loss": ("--z-loss-weight", "0.5"),
    "bias": ("--row-col-parallel-linear-bias",),
}


class Norms:
    """The gradient norm of each step."""

    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def optimizer_step(self):
        update = yield
        self.seen.append(update.grad_norm)
        return update


def run(*flags):
    norms = Norms()
    fake.adapt(*declared_features(DECLARATIONS), extra=(norms,))
    ran = fake.run_script(*MODEL, *flags)
    fake.forget_run()
    return [line["lm loss"] for line in ran["log"] if "lm loss" in line], norms.seen, ran["err"]


def train(layout):
    return {name: run(*flags, *layout) for name, flags in KINDS.items()}


@pytest.fixture(scope="module")
def trained():
    return run_world(train, 1, ())[0], run_world(train, 2, TP2)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_as_one_process(trained, kind):
    (losses, norms, errors), ranks = trained[0][kind], trained[1]
    assert len(norms) == 3, errors
    for rank in ranks:
        assert rank[kind][0] == pytest.approx(losses, rel=1e-5), rank[kind][2]
        assert rank[kind][1] == pytest.approx(norms, rel=1e-4)


def saved(folder):
    """A base, adapters on it, and their continuation."""
    steps = ("--train-iters", "4", "--lr-warmup-iters", "1", "--min-lr", "1e-3")
    found = {"base": run("--train-iters", "1", "--save", f"{folder}/base", "--save-interval", "1")}
    base = (*steps, *LORA, "--load", f"{folder}/base")
    found["whole"] = run(*base)
    stop = ("--save", f"{folder}/adapter", "--save-interval", "2", "--exit-interval", "2")
    found["first"] = run(*base, *stop)
    found["rest"] = run(*base, "--lora-load", f"{folder}/adapter")
    found["otherwise"] = run(
        *steps, *LORA, "--pretrained-checkpoint", f"{folder}/base", "--load", f"{folder}/adapter"
    )
    try:
        found["other"] = run(*steps, *LORA, "--load", f"{folder}/adapter")
    except Exception as error:
        found["other"] = str(error)
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    return run_world(saved, 1, str(tmp_path_factory.mktemp("runs")))[0]


@pytest.mark.parametrize("way", ["rest", "otherwise"])
def test_adapters_go_on_beside_their_base(resumed, way):
    whole, first, rest = resumed["whole"], resumed["first"], resumed[way]
    assert len(whole[1]) == 4, whole[2]
    assert [*first[1], *rest[1]] == whole[1], rest[2]


def test_adapters_beside_another_base_are_refused(resumed):
    assert "its adapters were trained beside" in str(resumed["other"])
