"""Needs of padding: positions that are no tokens change nothing, on any layout."""

from types import SimpleNamespace

import pytest
import torch
from toy_training import PP2, TP2, parameters, step, training

from mindspeed_core.errors import DataError, UserError
from mindspeed_core.feature import hookimpl
from mindspeed_core.run import Batch
from mindspeed_megatron.data_source import check_kept_apart
from mindspeed_megatron.padding import StepLengths, padding_options
from mindspeed_testing import run_world
from mindspeed_train.monitoring.measures import Measures

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --disable-bias-linear --swiglu "
    "--num-layers 2 --moe-token-dispatcher-type alltoall --calculate-per-token-loss"
).split()
AUX = (*EXPERTS, "--moe-aux-loss-coeff", "0.5", "--moe-z-loss-coeff", "0.05")
# Not the loss on logits: a mean over the tokens of a micro-batch, whatever samples they are of.
SEQUENCES = (*EXPERTS, "--moe-aux-loss-coeff", "0.5", "--moe-router-load-balancing-type", "seq_aux_loss")
BIASED = (
    *EXPERTS,
    *"--moe-router-score-function sigmoid --moe-router-enable-expert-bias".split(),
    *"--moe-router-load-balancing-type none --moe-router-bias-update-rate 0.5".split(),
)
SP = ("--sequence-parallel", "--expert-tensor-parallel-size", "1")
EP2 = ("--expert-model-parallel-size", "2")
PAIRS = ("--micro-batch-size", "2")
STEPS = 2


def length_of(number):
    return 9 + 5 * (number * 3 % 5)


class Unpadded:
    """Samples of their own lengths, one by one."""

    @hookimpl(wrapper=True, trylast=True)
    def get_batch(self, run, microbatch):
        batch = yield
        size, dp = run.args.micro_batch_size, run.pg.dp
        first = run.consumed_train_samples + (microbatch * dp.size() + dp.rank()) * size
        rows = [self.row(run, first + index) for index in range(size)]
        made = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        kept = {name: value for name, value in made.items() if getattr(batch, name) is not None}
        return batch.with_(**kept, **self.mask(made))

    def row(self, run, number):
        length = length_of(number)
        drawn = torch.rand(length + 1, generator=torch.Generator().manual_seed(number)).square()
        tokens = (drawn * run.args.vocab_size).long()
        return self.filled_up(
            run,
            {
                "tokens": tokens[:-1],
                "labels": tokens[1:],
                "loss_mask": (torch.arange(length) >= length // 3).float(),
                "position_ids": torch.arange(length),
            },
        )

    def filled_up(self, run, row):
        return row

    def mask(self, made):
        return {}


class Unmasked(Unpadded):
    """The same, filled up with a token, and nobody is told."""

    def filled_up(self, run, row):
        more = run.args.seq_length - len(row["tokens"])
        return {
            name: torch.nn.functional.pad(value, (0, more), value=5 if name == "tokens" else 0)
            for name, value in row.items()
        }


class Padded(Unmasked):
    """The same, and the batch says which positions are tokens."""

    def mask(self, made):
        loss_mask = made["loss_mask"]
        last = loss_mask.flip(1).cumsum(1).flip(1) > 0
        return {"padding_mask": ~last}


def trained(*flags, probe, initial=None):
    with training(*flags, "--log-throughput", initial=initial, probes=[probe()]) as run:
        run.session.state(Measures).start(run)
        before = parameters(run)
        results = [step(run) for _ in range(STEPS)]
        work = run.session.state(StepLengths).work
        losses = [dict(result.losses) for result in results]
        norms = [result.grad_norm for result in results]
        told = [result.tokens for result in results], None if work is None else work.samples
        numbers = run.session.call("log_step", run=run, result=results[-1])
        assert numbers["tokens_per_second"] == results[-1].tokens / results[-1].seconds
        if work is not None:
            speed = numbers["tflops_per_device"] * results[-1].seconds * run.dist.world_size
            assert speed == pytest.approx(work.model / 1e12)
        return before, losses, norms, parameters(run).tensors, told


def one_rank():
    found = {}
    for name, flags in (("aux", AUX), ("sequences", SEQUENCES), ("biased", BIASED)):
        found[name] = trained(*flags, probe=Unpadded)
        found[f"{name}, padded"] = trained(*flags, probe=Padded)
    found["aux, unmasked"] = trained(*AUX, probe=Unmasked)
    found["sequences, pairs"] = trained(*SEQUENCES, *PAIRS, probe=Padded)
    found["aux, recomputed"] = trained(
        *AUX,
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        "1",
        probe=Padded,
    )
    return found


MODELS = {"aux": AUX, "sequences": (*SEQUENCES, *PAIRS), "biased": BIASED}
LAYOUTS = {"tp2, sp": (*TP2, *SP), "pp2": PP2, "ep2": EP2}
CASES = [("aux", "tp2, sp"), ("aux", "pp2"), ("aux", "ep2"), ("sequences", "tp2, sp"), ("biased", "ep2")]


def two_ranks(initial):
    return {
        f"{name}, {layout}": trained(*MODELS[name], *LAYOUTS[layout], probe=Padded, initial=initial[name])
        for name, layout in CASES
    }


@pytest.fixture(scope="module")
def alone():
    (found,) = run_world(one_rank, 1)
    return found


@pytest.fixture(scope="module")
def together(alone):
    return run_world(two_ranks, 2, {name: alone[name][0] for name in ("aux", "sequences", "biased")})


def check(found, expected):
    _, losses, norms, weights, _ = found
    assert norms == pytest.approx(expected[2], rel=2e-5)
    for one, other in zip(losses, expected[1], strict=True):
        assert one == pytest.approx(other, rel=2e-5)
    assert max(float((weights[key] - expected[3][key]).abs().max()) for key in weights) < 1e-5


@pytest.mark.parametrize(
    "name", ["aux, padded", "aux, recomputed", "sequences, padded", "sequences, pairs", "biased, padded"]
)
def test_filled_up_samples_train_like_samples_of_their_own_lengths(alone, name):
    check(alone[name], alone[name.partition(",")[0]])


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_and_so_they_do_on_every_layout(alone, together, name, layout):
    for rank in together:
        check(rank[f"{name}, {layout}"], alone[name])


def test_without_a_mask_positions_that_are_no_tokens_are_balanced(alone):
    norms, expected = alone["aux, unmasked"][2], alone["aux"][2]
    assert abs(norms[0] - expected[0]) > 0.01 * expected[0]


def test_tokens_of_a_step_are_those_of_its_samples_on_every_rank(alone, together):
    expected = [sum(length_of(4 * index + sample) for sample in range(4)) for index in range(STEPS)]
    assert alone["aux, padded"][4][0] == expected
    samples = alone["aux, padded"][4][1]
    # Less than by tokens: attention grows with the square of the length.
    assert 0.8 * expected[-1] / 32 < samples < expected[-1] / 32
    for rank in together:
        for layout in LAYOUTS:
            assert rank[f"aux, {layout}"][4] == (expected, pytest.approx(samples))


@pytest.mark.parametrize(
    ("config", "planned", "reason"),
    [
        ({}, True, "overlaps parts of layers"),
        ({"mtp_num_layers": 1}, False, "--mtp-num-layers"),
        ({"moe_expert_capacity_factor": 1.0}, False, "--moe-expert-capacity-factor"),
        ({"moe_permute_fusion": True}, False, "--moe-permute-fusion"),
    ],
)
def test_what_loses_the_mask_is_refused(config, planned, reason):
    usual = {"num_moe_experts": 4, "moe_expert_capacity_factor": None, "moe_permute_fusion": False}
    run = SimpleNamespace(config=SimpleNamespace(**{**usual, "sequence_parallel": False, **config}))
    batch = Batch(padding_mask=torch.zeros(1, 4, dtype=torch.bool))

    class Model(torch.nn.Module):
        def forward(self, padding_mask=None):
            return padding_mask

    with pytest.raises(UserError, match=reason):
        padding_options(run, batch, Model(), planned=planned)
    assert padding_options(run, Batch(), Model(), planned=planned) == {}


def source(**flags):
    return (
        SimpleNamespace(plan=SimpleNamespace(slots={"data-source": "acme-rows"})),
        SimpleNamespace(**{"reset_attention_mask": False, "reset_position_ids": False, **flags}),
    )


def test_rows_of_several_documents_without_their_flags_are_refused():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    with pytest.raises(DataError, match=r"acme-rows: .* add --reset-attention-mask --reset-position-ids"):
        check_kept_apart(*source(), {"position_ids": positions})
    with pytest.raises(DataError, match=r"add --reset-position-ids$"):
        check_kept_apart(*source(reset_attention_mask=True), {"position_ids": positions})
    check_kept_apart(*source(reset_attention_mask=True, reset_position_ids=True), {"position_ids": positions})


def test_rows_that_are_filled_up_with_first_positions_are_no_documents():
    positions = torch.tensor([[0, 1, 2, 0, 0, 0]])
    sample = {"position_ids": positions, "loss_mask": torch.tensor([[1.0, 1, 1, 0, 0, 0]])}
    check_kept_apart(*source(), sample)
    session, args = source()
    session.plan.slots.clear()
    check_kept_apart(session, args, {"position_ids": positions})
