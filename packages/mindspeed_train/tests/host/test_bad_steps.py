"""Steps that would spoil the weights: found, named, and skipped or the end of the run, on all ranks alike."""

import shlex

import pytest

from mindspeed_testing.worlds import run_world

FLAGS = shlex.split(
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --num-workers 0 --lr 1e-3 --train-iters 40 "
    "--eval-iters 0 --use-cpu-initialization"
)


class Spoil:
    """Multiplies what a module gives, or a gradient, with nan on the last rank while it is on."""

    def __init__(self, run, module=None, parameter=None, after=0):
        self.mine = run.dist.rank == run.dist.world_size - 1
        self.on = self.mine
        self.after = after
        if module is not None:
            run.model[0].module.get_submodule(module).register_forward_hook(self.output)
        if parameter is not None:
            run.model[0].module.get_parameter(parameter).register_hook(self.gradient)

    def output(self, module, inputs, output):
        if not self.on:
            return None
        self.after -= 1
        if self.after >= 0:
            return None
        return (output[0] * float("nan"), *output[1:]) if isinstance(output, tuple) else output * float("nan")

    def gradient(self, gradient):
        return gradient * float("nan") if self.on else gradient


def weights(run):
    return [parameter.detach().clone() for chunk in run.model for parameter in chunk.parameters()]


def world(cases):
    import torch

    from mindspeed_core.activation import activate
    from mindspeed_core.errors import UserError
    from mindspeed_train import loop
    from mindspeed_train.fault_tolerance import bad_steps

    found = {}
    for case, flags in cases.items():
        session = activate([*FLAGS, *flags], host="standalone")
        run = loop.setup(session)
        for _ in range(2):
            session.call("train_step", run=run)
            run.iteration += 1
        before = weights(run)
        spoil = None
        # As on a device, where the host does not wait for the loss of a micro-batch.
        bad_steps.known_at_once = lambda run, later="later" in case: not later
        if "module" in case:
            spoil = Spoil(run, module="decoder.layers.1.mlp.linear_fc1")
        elif "gradient" in case:
            spoil = Spoil(run, parameter="decoder.layers.0.self_attention.linear_proj.weight")
        elif "shard of a weight" in case:
            if run.dist.rank == 1:
                with torch.no_grad():
                    run.model[0].module.get_parameter("decoder.layers.1.mlp.linear_fc1.weight")[3] = float(
                        "nan"
                    )
        elif "weight" in case:
            with torch.no_grad():
                run.model[0].module.get_parameter("decoder.final_layernorm.weight")[3] = float("inf")
        elif "spike" in case:
            recent = session.state(bad_steps.BadSteps).recent
            recent.clear()
            recent.extend([0.01] * 10)
        try:
            result = session.call("train_step", run=run)
            run.iteration += 1
            error, skipped = "", result.skipped
        except UserError as caught:
            error, skipped = str(caught), None
        same = all(torch.equal(a, b) for a, b in zip(before, weights(run)))
        after = None
        if spoil is not None and not error:
            spoil.on = False
            after = session.call("train_step", run=run).skipped
            spoil.on = spoil.mine
            try:
                for _ in range(4):
                    session.call("train_step", run=run)
            except UserError as caught:
                error = str(caught)
        found[case] = {
            "error": error,
            "skipped": skipped,
            "same": same,
            "after": after,
        }
        loop.teardown(session)
        session.close()
    return found


SKIP = ["--bad-step-action", "skip", "--bad-step-limit", "2"]
CASES = {
    "skip module": SKIP,
    "skip gradient": SKIP,
    "skip gradient, sharded": [*SKIP, "--use-distributed-optimizer", "--overlap-grad-reduce"],
    "skip spike": [*SKIP, "--check-for-spiky-loss"],
    "stop spike": ["--check-for-spiky-loss", "--loss-spike-factor", "50"],
    "spike unnoticed": [],
    "skip module, later": SKIP,
    "shard of a weight": ["--tensor-model-parallel-size", "2"],
}
FC1 = "decoder.layers.{}.mlp.linear_fc1"
SHARDED = ["--use-distributed-optimizer", "--overlap-grad-reduce"]
EXPERTS = [*("--num-experts", "2", "--expert-model-parallel-size", "2"), "--disable-bias-linear"]
ITS_OUTPUT = "the first bad tensor is the output of decoder.layers.1.mlp.linear_fc1"
TOGETHER = {
    "second micro-batch": (
        ["--global-batch-size", "4"],
        {"module": FC1.format(1), "after": 1},
        ["step 2, micro-batch 1 on rank 1", ITS_OUTPUT],
    ),
    "overlapped": (SHARDED, {"module": FC1.format(1)}, ["micro-batch 0 on rank 1", ITS_OUTPUT]),
    "last stage": (
        ["--pipeline-model-parallel-size", "2"],
        {"module": FC1.format(0)},
        ["micro-batch 0 on rank 1", "the output of decoder.layers.0.mlp.linear_fc1"],
    ),
    "one rank of a loss": (
        ["--tensor-model-parallel-size", "2"],
        {"module": ""},
        ["micro-batch 0 on rank 1", "other ranks of its tensor-parallel group see another loss"],
    ),
    "experts": (EXPERTS, {"module": ""}, ["micro-batch 0 on rank 1", "all weights are finite"]),
    "evaluation": ([], {"module": ""}, ["micro-batch 0 on rank 1"]),
    "gradient, overlapped": (
        SHARDED,
        {"parameter": "decoder.layers.0.self_attention.linear_proj.weight"},
        ["the gradient of decoder.layers.0.self_attention.linear_proj.weight holds nan"],
    ),
}
"""Flags, what is spoilt on the last of two ranks, and what both say where losses are not known at once."""
ALONE = {"module": [], "module, later": [], "weight": [], "weight, later": [], "gradient": []}


def together(cases):
    """Return each case's error and whether the weights stayed, where the host waits for no micro-batch."""
    import torch

    from mindspeed_core.activation import activate
    from mindspeed_core.errors import UserError
    from mindspeed_train import loop
    from mindspeed_train.fault_tolerance import bad_steps
    from mindspeed_train.step import run_schedule

    bad_steps.known_at_once = lambda run: False
    found = {}
    for case, (flags, spoilt, _) in cases.items():
        session = activate([*FLAGS, *flags], host="standalone")
        run = loop.setup(session)
        session.call("train_step", run=run)
        run.iteration += 1
        before = weights(run)
        if run.dist.rank == run.dist.world_size - 1:
            Spoil(run, **spoilt)
        try:
            if case == "evaluation":
                run_schedule(run, run.data.train, 1, forward_only=True)
            else:
                session.call("train_step", run=run)
            error = ""
        except UserError as caught:
            error = str(caught)
        found[case] = error, all(torch.equal(a, b) for a, b in zip(before, weights(run)))
        loop.teardown(session)
        session.close()
    return found


@pytest.fixture(scope="module")
def agreed(asked_for):
    asked = asked_for("spoilt")
    return run_world(together, 2, {case: TOGETHER[case] for case in TOGETHER if case in asked}, timeout=100)


@pytest.mark.parametrize("spoilt", TOGETHER)
def test_every_rank_names_the_same_bad_loss_where_none_is_waited_for(agreed, spoilt):
    (error, same), other = (rank[spoilt] for rank in agreed)
    assert other == (error, same)
    assert same
    for words in TOGETHER[spoilt][2]:
        assert words in error


@pytest.fixture(scope="module")
def pair():
    return run_world(world, 2, CASES, timeout=100)


@pytest.fixture(scope="module")
def alone():
    return run_world(world, 1, ALONE)[0]


@pytest.mark.parametrize(
    "case", ["skip module", "skip module, later", "skip gradient", "skip gradient, sharded", "skip spike"]
)
def test_a_bad_step_is_skipped_on_all_ranks_and_changes_nothing(pair, case):
    for rank in pair:
        assert rank[case]["skipped"] is True
        assert rank[case]["same"]


@pytest.mark.parametrize("case", ["skip module", "skip gradient"])
def test_training_goes_on_after_a_skipped_step_until_the_limit(pair, case):
    for rank in pair:
        assert rank[case]["after"] is False
        assert "--bad-step-limit" in rank[case]["error"]


def test_a_spike_ends_the_run_on_all_ranks(pair):
    for rank in pair:
        assert "50 times 0.01" in rank["stop spike"]["error"]
        assert rank["stop spike"]["same"]
        assert rank["spike unnoticed"]["error"] == ""


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("module", ["the output of decoder.layers.1.mlp.linear_fc1 (ColumnParallelLinear)", "step 3"]),
        ("module, later", ["the output of decoder.layers.1.mlp.linear_fc1 (ColumnParallelLinear)", "step 3"]),
        ("weight, later", ["the weight decoder.final_layernorm.weight holds inf in 1 of 32 elements"]),
        ("weight", ["the weight decoder.final_layernorm.weight holds inf in 1 of 32 elements"]),
        ("gradient", ["the gradient of decoder.layers.0.self_attention.linear_proj.weight holds nan"]),
    ],
)
def test_the_first_bad_tensor_is_named(alone, case, words):
    for word in words:
        assert word in alone[case]["error"]


def test_a_weight_that_one_tensor_parallel_rank_has_spoilt_ends_the_run_on_all(pair):
    for rank in pair:
        error = rank["shard of a weight"]["error"]
        assert (
            "on tensor-parallel rank 1, the weight decoder.layers.1.mlp.linear_fc1.weight holds nan" in error
        )


def resumed(folder):
    """Messages of a run, its resumption and a new run from its weights on a loss of three times the usual."""
    from mindspeed_core.activation import activate
    from mindspeed_core.errors import UserError
    from mindspeed_train import loop
    from mindspeed_train.fault_tolerance import bad_steps

    spiky = ["--check-for-spiky-loss", "--loss-spike-factor", "3", *SKIP, "--save-interval", "100"]
    found = []
    anew = ["--finetune", "--load", folder, "--start-over"]
    for flags in (["--save", folder], ["--load", folder, "--save", folder], anew):
        session = activate([*FLAGS, *spiky, "--save", folder, *flags], host="standalone")
        run = loop.setup(session)
        before = session.state(bad_steps.BadSteps).state()
        if not found:
            for _ in range(bad_steps.FEWEST):
                session.call("train_step", run=run)
                run.iteration += 1
        loss = 3 * max(session.state(bad_steps.BadSteps).recent, default=1.0)
        try:
            reasons = [bad_steps.verdict(run, {"lm loss": loss}) for _ in range(2)]
        except UserError as error:
            reasons = str(error)
        state = session.state(bad_steps.BadSteps).state()
        if not found:
            session.call("save_checkpoint", run=run, reason="end")
        found.append((before, reasons, state))
        loop.teardown(session)
        session.close()
    return found


@pytest.fixture(scope="module")
def reopened(tmp_path_factory):
    return run_world(resumed, 1, str(tmp_path_factory.mktemp("spiky")), timeout=100)[0]


def test_a_resumed_run_remembers_the_losses_and_the_skipped_steps(reopened):
    (_, reasons, saved), (loaded, next_reasons, _), _ = reopened
    assert loaded == saved
    assert len(loaded["recent"]) == 10
    assert all("is more than 3 times" in reason for reason in reasons)
    # Two in a row were skipped before the checkpoint, which is the limit.
    assert "--bad-step-limit" in next_reasons


def test_a_new_run_from_its_weights_starts_with_no_losses(reopened):
    assert reopened[2][0] == {"recent": [], "in_a_row": 0}
