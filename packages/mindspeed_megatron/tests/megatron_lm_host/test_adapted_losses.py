"""Additions of features to the loss of a script, and reports whose names differ."""

import os
from pathlib import Path

import fake_training as fake
import pytest

from mindspeed_core.feature import Flag, hookimpl
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

LOCAL = ("--platform", "cpu", "--hidden-dropout", "0", "--eod-mask-loss")
Z = ("--acme-z-loss", "0.1")
# The loss function of older scripts: a mean, and no number of tokens.
MEAN = (('return total, num_tokens, {"lm loss": report}', 'return total / num_tokens, {"lm loss": report}'),)
# Labels stay outside of the model.
OUTSIDE = (
    ("labels=labels, packed_seq_params", "packed_seq_params"),
    (
        "losses = output_tensor.view(-1).float()",
        "losses = output_tensor.float().logsumexp(-1).view(-1)",
    ),
)


class OddNames(fake.ForTests):
    """Reports under a name that only some micro-batches have, and another one on each rank."""

    name = "odd-names"
    flags = (Flag("--odd-names", help="Report under odd names."),)

    @hookimpl(wrapper=True)
    def compute_loss(self, run, batch):
        loss = yield
        tokens = batch.loss_mask.sum()
        if run.context.microbatch % 2:
            loss = loss.plus("odd", 5.0 * tokens, tokens, weight=0.0)
        return loss.plus(f"rank {run.dist.rank}", 2.0 * tokens, tokens, weight=0.0)


class Perplexity(fake.ForTests):
    """Adds a name to the losses of a step."""

    name = "perplexity"
    flags = (Flag("--perplexity", help="Report the perplexity."),)

    @hookimpl(wrapper=True)
    def reduce_losses(self):
        losses = yield
        return losses | {"twice": 2.0 * losses["lm loss"]}


def trainings(folder, size):
    from acme_five.features import ZLoss

    def script(name, changes):
        return fake.changed_script(Path(folder) / f"{name}-{os.getpid()}.py", changes)

    fake.adapt(ZLoss, OddNames, Perplexity)
    found = {}
    runs = {
        "sum": (fake.SCRIPT, Z),
        "mean": (script("mean", MEAN), Z),
        "sum, without": (fake.SCRIPT, ()),
        "names": (fake.SCRIPT, ("--odd-names",)),
        "added": (fake.SCRIPT, ("--perplexity",)),
    }
    if size == 1:
        runs["outside"] = (script("outside", OUTSIDE), Z)
    else:
        pp2 = ("--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
        runs["pp"] = (fake.SCRIPT, (*Z, "--perplexity", *pp2))
        runs["tp"] = (fake.SCRIPT, (*Z, "--tensor-model-parallel-size", "2"))
        runs["tp, mean"] = (script("mean", MEAN), (*Z, "--tensor-model-parallel-size", "2"))
    for name, (path, flags) in runs.items():
        try:
            found[name] = fake.run_script(*LOCAL, *flags, script=path)
        except Exception as error:
            found[name] = {"log": [], "failure": f"{type(error).__name__}: {error}"}
        fake.forget_run()
    return found


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("scripts"))
    return run_world(f"{__name__}:trainings", request.param, folder, request.param, timeout=180)


def steps(result, name="lm loss"):
    found = [line[name] for line in result["log"] if name in line and "lm loss" in line]
    assert len(found) == 3, result.get("err", result)
    return found


@pytest.mark.parametrize("layout", ["", "tp"])
def test_an_addition_is_the_same_whether_the_script_returns_a_sum_or_a_mean(ranks, layout):
    for rank in ranks:
        if layout and layout not in rank:
            continue
        one, other = rank[layout or "sum"], rank["tp, mean" if layout else "mean"]
        assert steps(other) == pytest.approx(steps(one), rel=1e-5)
        assert steps(other, "z loss") == pytest.approx(steps(one, "z loss"), rel=1e-5)
        assert steps(one)[1:] != pytest.approx(steps(rank["sum, without"])[1:], rel=1e-4)


def test_logits_shrink_by_it(ranks):
    for rank in ranks:
        values = steps(rank["sum"], "z loss")
        assert values[0] > values[2] > 0.0


def test_names_that_differ_are_reduced_apart(ranks):
    for rank in ranks:
        assert steps(rank["names"]) == steps(rank["sum, without"])
        for index in range(len(ranks)):
            assert steps(rank["names"], f"rank {index}") == pytest.approx([2.0] * 3)
        validated = next(line for line in rank["names"]["log"] if "validation lm loss" in line)
        assert {f"validation rank {index}" for index in range(len(ranks))} <= set(validated)


def test_a_feature_adds_a_name_to_the_losses_of_a_step(ranks):
    for rank in ranks:
        assert steps(rank["added"], "twice") == pytest.approx([2 * loss for loss in steps(rank["added"])])


def test_it_reads_them_on_every_pipeline_stage(ranks):
    if "pp" in ranks[0]:
        last = ranks[-1]["pp"]
        assert "failure" not in ranks[0]["pp"]
        assert steps(last, "twice") == pytest.approx([2 * loss for loss in steps(last)])
        assert steps(last, "z loss")[0] > 0.0


def test_a_script_that_computes_its_loss_from_logits_is_refused(ranks):
    for rank in ranks:
        if "outside" in rank:
            assert "acme-z-loss: needs the logits" in str(rank["outside"])
