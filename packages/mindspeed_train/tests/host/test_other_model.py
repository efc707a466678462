"""Weights are not loaded into a model that computes something else, whatever its tensors look like."""

from __future__ import annotations

import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_checkpoint_resume import NO_DROPOUT, SMALL, Messages, close_run, open_run, save, train

from mindspeed_core.errors import UserError
from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_core.registry import Registry
from mindspeed_core.session import current
from mindspeed_testing.worlds import run_world
from mindspeed_train.monitoring.run_log import announce

ROPE = ["--position-embedding-type", "rope", *NO_DROPOUT]
EXPERTS = [*ROPE, "--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall"]

# Another function with the same tensors: what was changed, and how the refusal shows it.
CHANGED = {
    "--num-attention-heads 8": "--num-attention-heads 4 (checkpoint) / 8 (this run)",
    "--num-attention-heads 2": "--num-attention-heads 4 (checkpoint) / 2 (this run)",
    "--position-embedding-type none": "--position-embedding-type rope (checkpoint) / none (this run)",
    "--rotary-base 500": "--rotary-base 10000 (checkpoint) / 500 (this run)",
    "--use-rope-scaling": "use_rope_scaling False (checkpoint) / True (this run)",
    "--rotary-percent 0.5": "--rotary-percent 1.0 (checkpoint) / 0.5 (this run)",
    "--rotary-interleaved": "rotary_interleaved False (checkpoint) / True (this run)",
    "--rotary-seq-len-interpolation-factor 2": "factor not set (checkpoint) / 2 (this run)",
    "--norm-epsilon 1e-3": "--norm-epsilon 1e-05 (checkpoint) / 0.001 (this run)",
    "--softmax-scale 0.3": "--softmax-scale not set (checkpoint) / 0.3 (this run)",
    "--window-size 4,0": "--window-size not set (checkpoint) / 4 0 (this run)",
    "--no-rope-freq 2": "--no-rope-freq not set (checkpoint) / 0 1 (this run)",
    "--squared-relu": "activation_func gelu (checkpoint) / squared_relu (this run)",
    "--scaled-embedding 2": "scaled_embedding not set (checkpoint) / 2.0 (this run)",
}
OF_EXPERTS = {
    "--moe-router-topk 3": "--moe-router-topk 2 (checkpoint) / 3 (this run)",
    "--moe-router-score-function sigmoid": "softmax (checkpoint) / sigmoid (this run)",
    "--moe-router-topk-scaling-factor 2.5": "not set (checkpoint) / 2.5 (this run)",
    "--moe-router-pre-softmax": "moe_router_pre_softmax False (checkpoint) / True (this run)",
}


class ScaledEmbedding(Feature):
    """Changes the function, and no tensor and no field."""

    name, family, summary = "scaled-embedding", "tests", "For tests."
    flags = (Flag("--scaled-embedding", type=float, default=1.0, help="Scale."),)
    affects_checkpoint = False

    @classmethod
    def model_facts(cls, args):
        return {"scaled_embedding": args.scaled_embedding}

    @hookimpl(wrapper=True)
    def build_model(self, args):
        model = yield
        for chunk in model:
            chunk.embedding.register_forward_hook(lambda _, given, result: result * args.scaled_embedding)
        return model


def attempt(flags, steps=1):
    """Start a run: what it said, and its refusal or its first loss."""
    messages = Messages()
    try:
        run = open_run(flags, registry=Registry.of([ScaledEmbedding]))
        lines = []
        announce(run, SimpleNamespace(say=lines.append), 0.0)
        loss = train(run, steps)[0][0] if steps else None
        close_run(run)
        return "", messages.end(), loss, lines[-1]
    except UserError as error:
        from mindspeed_train import loop

        session = current()
        loop.teardown(session)
        session.close()
        return f"{type(error).__name__}: {error}", messages.end(), None, ""


def sampling(flags):
    """Load as ``sample`` does: what refused it."""
    from mindspeed_core.activation import prepare
    from mindspeed_train import loop

    registry = Registry.of([ScaledEmbedding])
    with prepare([*SMALL, *flags], host="standalone", mode="inference", registry=registry) as session:
        try:
            loop.setup(session)
            return ""
        except UserError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            loop.teardown(session)


def record(flags):
    """The record of a model, from its configuration: nothing is built."""
    from mindspeed_core.activation import prepare
    from mindspeed_megatron.model_record import describe_model

    registry = Registry.of([ScaledEmbedding])
    with prepare([*SMALL, *flags], host="standalone", mode="inference", registry=registry) as session:
        args = session.call("validate_arguments_early", args=session.args, plan=session.plan)
        args = session.call("validate_arguments", args=args, plan=session.plan)
        config = session.call("build_transformer_config", args=args)
        return describe_model(config, session, args=args)


def comparisons(model, changes):
    """Refusals of each change of a model."""
    from mindspeed_megatron.model_comparison import check_model
    from mindspeed_megatron.model_record import read_record

    session = SimpleNamespace(args=Namespace(allow_other_model=None))
    before = read_record(record(model).as_dict(), "there")
    found = {}
    for changed in changes:
        try:
            check_model(session, before, record([*model, *changed.split()]), "there", resumes=True)
            found[changed] = ""
        except UserError as error:
            found[changed] = f"{type(error).__name__}: {error}"
    return found


def saved(folder, flags, steps=2):
    run = open_run(["--save", str(folder), *flags], registry=Registry.of([ScaledEmbedding]))
    train(run, steps)
    save(run)
    loss = train(run, 1)[0][0]
    close_run(run)
    return loss


def without_record(folder, target):
    """A checkpoint as older versions wrote it: the manifest and ``args`` say something of the model."""
    import torch

    from mindspeed_megatron.model_record import KEY

    shutil.copytree(folder, target)
    common = target / "iter_0000002" / "common.pt"
    state = torch.load(common, weights_only=False)
    del state["features"][KEY]
    torch.save(state, common)
    from mindspeed_train.checkpoint import manifests

    manifest = manifests.read_manifest(target / "iter_0000002")
    model = {name: value for name, value in manifest.model.items() if name != "softmax_vocab_size"}
    (target / "iter_0000002" / manifests.MANIFEST).write_text(
        manifests.describe(replace(manifest, model=model, sealed=False))
    )


def of_megatron_lm(folder, target, **values):
    """A checkpoint whose ``args`` are all that says how the model was: no manifest, no record."""
    import torch

    without_record(folder, target)
    (target / "iter_0000002" / "manifest.json").unlink()
    common = target / "iter_0000002" / "common.pt"
    state = torch.load(common, weights_only=False)
    state["args"] = Namespace(**{**vars(state["args"]), **values})
    torch.save(state, common)


def everything(folder):
    folder = Path(folder)
    dense, old, foreign = (str(folder / name) for name in ("dense", "old", "foreign"))
    found = {"loss": saved(dense, ROPE), "same": attempt(["--load", dense, *ROPE])}
    found["changed"] = {**comparisons(ROPE, ["", *CHANGED]), **comparisons(EXPERTS, OF_EXPERTS)}
    other = ["--load", dense, *ROPE, "--norm-epsilon", "1e-3", "--scaled-embedding", "2"]
    found["resumed"] = attempt(other, 0)[0]
    found["sampled"] = sampling(other)
    found["sampled same"] = sampling(["--load", dense, *ROPE])
    base = [*ROPE, "--rotary-base", "500"]
    found["pretrained"] = attempt(["--pretrained-checkpoint", dense, *base], 0)
    found["pretrained same"] = attempt(["--pretrained-checkpoint", dense, "--load", str(folder / "e"), *ROPE])
    found["finetune"] = attempt(["--load", dense, "--finetune", *base], 0)
    found["allowed"] = attempt(["--load", dense, *base, "--allow-other-model", "--rotary-base".lstrip("-")])
    found["misspelled"] = attempt(["--load", dense, *base, "--allow-other-model", "rotary_bass"], 0)
    found["training"] = attempt(["--load", dense, *ROPE, "--seq-length", "8", "--hidden-dropout", "0.3"])
    without_record(Path(dense), Path(old))
    unread = ["--verify-checkpoint", "off"]
    found["old"] = attempt(["--load", old, *unread, *ROPE])
    found["old changed"] = attempt(["--load", old, *unread, *ROPE, "--num-attention-heads", "8"], 0)
    of_megatron_lm(
        Path(dense), Path(foreign), rotary_base=10000, swiglu=False, squared_relu=False, quick_geglu=False
    )
    found["foreign"] = attempt(["--load", foreign, *unread, *ROPE])
    found["foreign changed"] = attempt(
        ["--load", foreign, *unread, *ROPE, "--rotary-base", "500", "--squared-relu"], 0
    )
    return found


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return run_world(everything, 1, str(tmp_path_factory.mktemp("models")))[0]


def test_the_same_model_goes_on_without_a_word(single):
    error, said, loss, _ = single["same"]
    assert (error, said) == ("", [])
    assert loss == single["loss"]


@pytest.mark.parametrize("changed", [*CHANGED, *OF_EXPERTS])
def test_a_flag_that_changes_the_function_and_no_shape_is_refused_with_both_values(single, changed):
    error = single["changed"][changed]
    assert error.startswith("CheckpointError")
    assert {**CHANGED, **OF_EXPERTS}[changed] in error


@pytest.mark.parametrize("way", ["resumed", "sampled"])
def test_sampling_and_training_load_by_one_rule(single, way):
    assert single["changed"][""] == single["sampled same"] == ""
    assert "--norm-epsilon 1e-05 (checkpoint) / 0.001 (this run)" in single[way]
    assert "scaled_embedding not set (checkpoint) / 2.0 (this run)" in single[way]


@pytest.mark.parametrize("way", ["pretrained", "finetune"])
def test_weights_alone_are_compared_too(single, way):
    assert "--rotary-base 10000 (checkpoint) / 500 (this run)" in single[way][0]


def test_a_run_that_starts_from_other_weights_says_so(single):
    error, said, _loss, line = single["pretrained same"]
    assert error == ""
    assert len(said) == 1
    assert "starting from the weights of --pretrained-checkpoint" in said[0]
    assert "from step 0 with the weights of" in line


def test_a_field_that_may_differ_is_named_and_said(single):
    error, said, loss, _ = single["allowed"]
    assert error == ""
    assert "--rotary-base 10000 (checkpoint) / 500 (this run)" in said[0]
    assert loss != single["loss"]


def test_a_field_that_does_not_exist_is_refused(single):
    assert "--allow-other-model 'rotary_bass'" in single["misspelled"][0]
    assert "rotary_base" in single["misspelled"][0]


def test_what_only_changes_training_is_one_line(single):
    error, said, _, _ = single["training"]
    assert error == ""
    assert len(said) == 1
    assert "--seq-length 16 (checkpoint) / 8 (this run)" in said[0]
    assert "--hidden-dropout 0.0 (checkpoint) / 0.3 (this run)" in said[0]
    assert "the place in the data" in said[0]


@pytest.mark.parametrize("kind", ["old", "foreign"])
def test_a_checkpoint_without_a_record_goes_on_loading(single, kind):
    error, _, loss, _ = single[kind]
    assert (error, loss) == ("", single["loss"])


def test_what_a_checkpoint_without_a_record_knows_is_compared(single):
    assert "--num-attention-heads 4 (checkpoint) / 8 (this run)" in single["old changed"][0]
    assert "--rotary-base 10000 (checkpoint) / 500 (this run)" in single["foreign changed"][0]
    assert "activation_func gelu (checkpoint) / squared_relu (this run)" in single["foreign changed"][0]
