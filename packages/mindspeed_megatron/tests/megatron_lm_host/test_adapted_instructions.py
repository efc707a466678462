"""Instruction data in Megatron-LM's scripts: the losses of mindspeed-train, on every layout."""

from __future__ import annotations

import logging

import fake_training as fake
import pytest

from mindspeed_core.activation import activate
from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.feature import hookimpl
from mindspeed_cp.features import DECLARATIONS as SEQUENCES
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_models.features import DECLARATIONS
from mindspeed_models.features.instruction_proofs import write_samples
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop

INSTRUCTIONS = ("--is-instruction-dataset", "--split", "1,0,0", "--seq-length", "128")
SHARED = (
    *("--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "64", "--num-attention-heads", "4"),
    *("--max-position-embeddings", "128", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--use-cpu-initialization", "--untie-embeddings-and-output-weights", "--eval-iters", "0"),
    *("--lr", "1e-2", "--min-lr", "0", "--lr-decay-style", "linear", "--train-iters", "3"),
)
OURS = (
    *("--vocab-size", "128", "--make-vocab-size-divisible-by", "1", "--attention-dropout", "0"),
    *("--hidden-dropout", "0", "--weight-decay", "0.01", "--num-workers", "0", "--verify-checkpoint", "off"),
)
THEIRS = ("--platform", "cpu", "--vocab-size", "128")
EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-aux-loss-coeff", "0.1"),
    *("--moe-z-loss-coeff", "0.01", "--moe-token-dispatcher-type", "alltoall", "--moe-router-topk", "2"),
)
VARIABLE, PACK = ("--variable-seq-lengths",), ("--pack-samples",)
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PP2 = ("--pipeline-model-parallel-size", "2")
KINDS = {
    "fixed": (),
    "variable": VARIABLE,
    "grouped": (*VARIABLE, "--group-by-length"),
    "packed": PACK,
    "experts": EXPERTS,
    "experts, variable": (*EXPERTS, *VARIABLE),
}
LAYOUTS = {"tp2": TP2, "pp2": PP2, "dp2": ()}


class Norms:
    """The gradient norm of each step."""

    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def optimizer_step(self):
        update = yield
        self.seen.append(float(update.grad_norm))
        return update


def data(folder):
    return ("--data-path", f"{folder}/samples", *INSTRUCTIONS)


def script(*flags):
    norms = Norms()
    fake.adapt(*declared_features(DECLARATIONS), *SEQUENCES, extra=(norms,))
    ran = fake.run_script(*SHARED, *THEIRS, *flags)
    fake.forget_run()
    return [line["lm loss"] for line in ran["log"] if "lm loss" in line], norms.seen, ran["err"]


def refused(*flags):
    try:
        return script(*flags)[2]
    except Exception as error:
        return str(error)


def bases(folder):
    """Weights from which everything begins."""
    for name, flags in {"dense": (), "experts": EXPERTS}.items():
        script(
            *flags, "--train-iters", "1", "--lr", "0", "--save", f"{folder}/{name}", "--save-interval", "1"
        )


def base_of(folder, kind):
    return f"{folder}/{'experts' if kind.startswith('experts') else 'dense'}"


def alone(folder):
    bases(folder)
    found = {
        kind: script(*flags, *data(folder), "--finetune", "--load", base_of(folder, kind))
        for kind, flags in KINDS.items()
    }
    half = ("--save", f"{folder}/half", "--save-interval", "2", "--exit-interval", "2")
    script(*VARIABLE, *data(folder), "--finetune", "--load", f"{folder}/dense", *half)
    found["resumed"] = script(*VARIABLE, *data(folder), "--load", f"{folder}/half")
    found["other order"] = refused(*VARIABLE, "--group-by-length", *data(folder), "--load", f"{folder}/half")
    found["absent"] = refused("--data-path", f"{folder}/absent", *INSTRUCTIONS)
    return found


def in_layouts(folder, kinds):
    return {
        (kind, name): script(
            *KINDS[kind], *layout, *data(folder), "--finetune", "--load", base_of(folder, kind)
        )
        for kind in kinds
        for name, layout in LAYOUTS.items()
    }


def standalone(folder):
    logging.getLogger("mindspeed_core").setLevel(logging.ERROR)
    found = {}
    for kind, flags in KINDS.items():
        line = [*SHARED, *OURS, *flags, *data(folder), "--pretrained-checkpoint", base_of(folder, kind)]
        losses, norms = [], []
        try:
            with activate(line, platform="cpu", host="standalone") as session:
                run = loop.setup(session)
                for _ in range(3):
                    result = session.call("train_step", run=run)
                    run.iteration += 1
                    run.consumed_train_samples += run.args.global_batch_size
                    losses.append(float(result.losses["lm loss"]))
                    norms.append(float(result.grad_norm))
        finally:
            destroy_megatron_state()
        found[kind] = losses, norms
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("instructions")
    write_samples(place)
    return str(place)


@pytest.fixture(scope="module")
def scripts(folder):
    return run_world(alone, 1, folder, timeout=300)[0]


@pytest.fixture(scope="module")
def ours(scripts, folder):
    return run_world(standalone, 1, folder, timeout=300)[0]


@pytest.fixture(scope="module")
def ranks(scripts, folder):
    return run_world(in_layouts, 2, folder, ["variable", "experts", "experts, variable"], timeout=500)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_norms_are_those_of_the_standalone_host(scripts, ours, kind):
    losses, norms, errors = scripts[kind]
    assert len(losses) == 3, errors
    assert losses == pytest.approx(ours[kind][0], rel=1e-5)
    assert norms == pytest.approx(ours[kind][1], rel=1e-4)


def test_what_fills_up_reaches_no_expert(scripts):
    losses, norms, errors = scripts["experts, variable"]
    assert len(losses) == 3, errors
    assert losses == pytest.approx(scripts["experts"][0], rel=1e-5), errors
    assert norms == pytest.approx(scripts["experts"][1], rel=1e-4)


def test_a_resumed_script_goes_on_with_the_next_samples(scripts):
    losses, _, errors = scripts["resumed"]
    assert losses == pytest.approx(scripts["variable"][0][2:], rel=1e-6), errors
    assert "come in groups for steps of 4" in scripts["other order"]


def test_files_that_are_not_there_are_named(scripts):
    assert "absent_packed_input_ids_document" in scripts["absent"]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["variable", "experts", "experts, variable"])
def test_two_ranks_learn_as_one_process(scripts, ranks, kind, layout):
    expected, norms, _ = scripts[kind]
    for rank in ranks:
        losses, seen, errors = rank[kind, layout]
        assert losses in ([], pytest.approx(expected, rel=1e-5)), errors
        assert seen == pytest.approx(norms, rel=1e-4), errors
