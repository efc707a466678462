"""Needs of a loss: the logits, and to add to what is trained, in every layout as in one process."""

import pytest
import torch
from toy_training import PP2, TP2, distance, gradients, parameters, step, training

from mindspeed_core.feature import hookimpl
from mindspeed_testing import run_world

Z = ("--acme-z-loss", "0.1")
VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "1")
PER_TOKEN = "--calculate-per-token-loss"
ROPE = ("--position-embedding-type", "rope")
MTP = ("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.1", *ROPE)
METHOD = "compute_language_model_loss"


class UnequalTokens:
    """Lets another number of tokens count in every sample."""

    @hookimpl(wrapper=True, tryfirst=True)
    def get_batch(self):
        batch = yield
        if batch.loss_mask is None:
            return batch
        places = torch.arange(batch.loss_mask.shape[1])
        counted = 4 + (batch.labels[:, :1] * 5) % 23
        return batch.with_(loss_mask=batch.loss_mask * (places < counted))


class WholeSequences:
    """The same for sequences that are split: before they are."""

    @hookimpl(wrapper=True, trylast=True)
    def get_batch(self):
        batch = yield
        places = torch.arange(batch.loss_mask.shape[1])
        counted = 4 + (batch.labels[:, :1] * 5) % 23
        return batch.with_(loss_mask=batch.loss_mask * (places < counted))


class Heads:
    """Remembers which predictions passed, and whether the default left the logits alone."""

    def __init__(self):
        self.seen, self.kept = [], True

    @hookimpl(wrapper=True)
    def compute_token_losses(self, run, logits, labels, head):
        before = logits.detach().clone()
        losses = yield
        self.seen.append((run.context.microbatch, run.context.training, head, tuple(logits.shape)))
        self.kept = self.kept and torch.equal(before, logits) and losses.shape == labels.shape
        return losses


# Name: flags of both sides, and those of the other layout.
LAYOUTS = {
    "tp": ((), TP2),
    "tp, sequence parallel, untied": (
        ("--untie-embeddings-and-output-weights",),
        (*TP2, "--sequence-parallel"),
    ),
    "tp, fused": (("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native"), TP2),
    "pp": ((), PP2),
    "interleaved": ((), (*PP2, *VIRTUAL)),
    "dp": ((), ()),
    "dp, per token": ((PER_TOKEN,), ()),
    "pp, per token": ((PER_TOKEN,), PP2),
    "cp": (ROPE, ("--context-parallel-size", "2")),
    "cp, per token": ((PER_TOKEN, *ROPE), ("--context-parallel-size", "2")),
    "mtp": (MTP, TP2),
    "fully sharded": (("--untie-embeddings-and-output-weights",), ("--use-torch-fsdp2",)),
    "shards gathered late": (
        (),
        ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
}


def trained(flags, initial=None):
    probe = WholeSequences() if "--context-parallel-size" in flags else UnequalTokens()
    with training(*flags, *Z, "--clip-grad", "0", initial=initial, probes=(probe,)) as run:
        begun = parameters(run)
        first = step(run)
        found = gradients(run)
        return (
            begun,
            found,
            [{**result.losses, "counted": result.loss_tokens} for result in (first, step(run))],
        )


def one_process(names):
    return {name: trained(LAYOUTS[name][0]) for name in names}


def other_layouts(expected):
    found = {}
    for name, (begun, wanted, losses) in expected.items():
        both, other = LAYOUTS[name]
        _, here, other_losses = trained((*both, *other), begun)
        found[name] = distance(wanted, here), losses, other_losses
    return found


@pytest.fixture(scope="module")
def alone(asked_for):
    return run_world(several, 1, sorted(asked_for("name")))[0]


@pytest.fixture(scope="module")
def layouts(alone):
    return run_world(other_layouts, 2, alone["layouts"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loss_on_logits_trains_as_in_one_process(layouts, name):
    for rank in layouts:
        difference, expected, losses = rank[name]
        assert difference < 1e-5
        for one, other in zip(expected, losses):
            assert one.keys() == other.keys()
            assert other == pytest.approx(one, rel=2e-5)
        assert losses[0]["z loss"] > 10.0
        assert 4 * 4 <= losses[0]["counted"] < 4 * 32


def by_hand():
    with training(*Z, "--global-batch-size", "1", "--clip-grad", "0", probes=(probe := Batches(),)) as run:
        initial = parameters(run)
        step(run)
        found = gradients(run)
    with training("--global-batch-size", "1", "--clip-grad", "0", initial=initial) as run:
        model = run.model[0].module
        batch = probe.batches[0]
        logits = model(batch.tokens, batch.position_ids, None).float()
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        (losses + 0.1 * logits.logsumexp(-1).square().mean()).backward()
        for parameter in model.parameters():
            parameter.main_grad = parameter.main_grad if parameter.grad is None else parameter.grad
        return distance(found, gradients(run))


class Batches:
    def __init__(self):
        self.batches = []

    @hookimpl(wrapper=True)
    def get_batch(self):
        self.batches.append((yield))
        return self.batches[-1]


def predictions():
    probe = Heads()
    flags = (*MTP, "--eval-iters", "1", "--eval-interval", "1", "--global-batch-size", "2")
    with training(*flags, probes=(probe,)) as run:
        step(run)
        run.session.call("evaluate", run=run, split="valid")
        model = run.model[0].module
        changed = passes(model)
    # Predictions of further tokens are weighed in the same method, with or without such a feature.
    with training(*flags) as run:
        weighed = METHOD in vars(run.model[0].module), passes(run.model[0].module)
    with training("--global-batch-size", "2") as run:
        plain = METHOD in vars(run.model[0].module)
    return probe.seen, probe.kept, changed, weighed, plain, METHOD in vars(model)


def passes(model):
    """Whether a model hands its logits to the stage: what stands in for its computation knows that one."""
    return hasattr(vars(model).get(METHOD), "plain")


def several(names):
    return {
        "layouts": one_process(names),
        "by hand": by_hand(),
        "predictions": predictions(),
        "without labels": without_labels(),
        "plan": [planned(), planned(Heads())],
        "unread": unread(),
    }


def test_its_gradient_is_that_of_the_formula(alone):
    assert alone["by hand"] < 1e-6


def test_the_stage_says_which_prediction_the_logits_are_of_and_keeps_them(alone):
    seen, kept, *_ = alone["predictions"]
    assert kept
    shape = (32, 1, 128)
    assert seen == [
        (index, training, head, shape) for training in (True, False) for index in (0, 1) for head in (1, 2, 0)
    ]


def test_models_are_changed_only_where_a_feature_wants_logits(alone):
    *_, changed, weighed, plain, afterwards = alone["predictions"]
    assert (changed, weighed) == (True, (True, False))
    assert (plain, afterwards) == (False, False)


def planned(*probes):
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
    from megatron.core.pipeline_parallel.utils import set_streams

    tokens = torch.arange(32)[None] * 3
    with training(probes=probes) as run:
        set_streams()
        plan = run.model[0].module.build_schedule_plan(
            tokens, torch.arange(32)[None], None, labels=tokens + 1, loss_mask=torch.ones(1, 32)
        )
        losses = TransformerModelChunkSchedulePlan.run(plan, None)
    return losses.detach(), [probe.seen for probe in probes]


def test_a_schedule_plan_passes_the_stage(alone):
    (plain, _), (passed, seen) = alone["plan"]
    assert torch.equal(plain, passed)
    assert seen == [[(-1, True, 0, (32, 1, 128))]]


def unread():
    with training(*Z, *MTP, "--num-experts", "2") as run:
        results = [step(run), step(run)]
        return [result.losses._numbers for result in results], sorted(results[1].losses)


def test_losses_stay_on_the_device_until_somebody_looks(alone):
    numbers, names = alone["unread"]
    assert numbers == [None, None]
    assert names == ["lm loss", "load_balancing_loss", "mtp_1 loss", "mtp_2 loss", "z loss"]


class OwnLoss:
    """Computes the loss from logits outside of the model."""

    @hookimpl
    def forward_step(self, session, run, data_iterator, model_chunk):
        batch = session.call("get_batch", run=run, data_iterator=data_iterator, vp_stage=None, microbatch=0)
        logits = model_chunk(batch.tokens, batch.position_ids, None)

        def loss(output):
            losses = torch.nn.functional.cross_entropy(output.flatten(0, 1), batch.labels.flatten())
            return losses, {"lm loss": torch.stack([losses.detach(), torch.ones(())])}

        return logits, loss


def without_labels():
    with training(*Z, probes=(OwnLoss(),)) as run:
        try:
            step(run)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_logits_that_never_pass_are_refused(alone):
    assert alone["without labels"].startswith("SessionError: acme-z-loss: needs the logits")
    assert "was called without labels" in alone["without labels"]
