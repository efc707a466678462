"""Measured plans: the same on all ranks of a stage, within their budget, equal bits in every form."""

import pytest
import torch

from mindspeed_core.activation import activate, prepare
from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_memory.features.proofs import EXPERTS, MODEL, PP2, TP2
from mindspeed_memory.policy.adaptive import AdaptiveRecompute
from mindspeed_memory.policy.costs import NOTHING, WHOLE
from mindspeed_testing import run_world
from mindspeed_testing.gloo_threads import released_when_waited
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

INSTALLED = Registry.discover()
LONG = ("--seq-length", "128", "--max-position-embeddings", "128")
SIZE, STEPS = "--adaptive-recompute-device-size", "--adaptive-recompute-profiling-step"
SWAPS = ("--adaptive-memory-optimization", "--swap-min-bytes", "256")
MEASURING = 6


def opened(*flags):
    line = training_flags((*flags, STEPS, str(MEASURING)), 12, INSTALLED)
    return activate(line, platform="cpu", registry=INSTALLED, host="standalone")


def policy_of(session):
    found = [getattr(feature, "_policy", None) for feature in session._features]
    return next(policy for policy in found if policy is not None)


def train(*flags, tightened=False):
    """Train until the plan was followed, and with less memory; return the policy's own numbers."""
    # A thread of the backend that lets go of a message late would count in one step and not in the next.
    with released_when_waited(), opened(*MODEL, *LONG, *flags) as session:
        run = loop.setup(session)
        policy: AdaptiveRecompute = policy_of(session)
        before = [layer.form for layer in policy.layers]
        for _ in range(MEASURING + 1):
            session.call("train_step", run=run)
        found = {
            "first": before,
            "forms": [layer.form for layer in policy.layers],
            "plan": policy.plan,
            "budget": policy.budget,
            "planned": policy.planned_bytes,
            "used": policy.used,
            "stage": run.pg.pp.rank(),
        }
        if tightened:
            # The budget falls under what the plan takes.
            policy.budget, policy._checks = policy.used - 2**18, 3
            for _ in range(3):
                session.call("train_step", run=run)
            found["smaller"] = policy.used, policy.budget, [layer.form for layer in policy.layers]
        loop.teardown(session)
    return found


def train_together():
    found = {"pipeline": train(*PP2, SIZE, "6", tightened=True)}
    with pytest.raises(UserError) as error:
        train(*PP2, SIZE, "2")
    return {**found, "refused": str(error.value)}


@pytest.fixture(scope="module")
def together():
    return run_world(train_together, 2)


def train_tensor_parallel():
    return train(*TP2, SIZE, "4", tightened=True)


@pytest.fixture(scope="module")
def tensor_parallel():
    return run_world(train_tensor_parallel, 2)


def test_plans_hold_their_budget_as_measured(together):
    hold_their_budget([rank["pipeline"] for rank in together])


def hold_their_budget(ranks):
    for found in ranks:
        assert found["first"] == [WHOLE] * len(found["forms"])
        assert found["forms"] != found["first"]
        assert 0 < found["used"] <= found["planned"] <= found["budget"]
        assert found["plan"].seconds < found["plan"].seconds_of_full


@pytest.mark.thorough
def test_plans_of_tensor_parallel_ranks_hold_their_budget(tensor_parallel):
    hold_their_budget(tensor_parallel)
    become_smaller(tensor_parallel)


@pytest.mark.thorough
def test_ranks_of_a_stage_have_the_same_plan(tensor_parallel):
    first, second = tensor_parallel
    assert first["plan"] == second["plan"]
    assert first["forms"] == second["forms"]


def test_stages_have_plans_of_their_own(together):
    first, second = (rank["pipeline"] for rank in together)
    # The first stage has the activations of two micro-batches, the second those of one.
    assert first["forms"].count(NOTHING) <= second["forms"].count(NOTHING)


def test_a_plan_that_takes_more_than_its_budget_becomes_smaller(together):
    become_smaller([rank["pipeline"] for rank in together])


def become_smaller(ranks):
    for found in ranks:
        used, budget, forms = found["smaller"]
        assert forms != found["forms"]
        # Where the last step that is measured takes more, all is computed again.
        assert used <= budget or forms == [WHOLE] * len(forms)


def test_a_budget_below_full_recomputation_is_refused_with_the_number_on_every_rank(together):
    for rank in together:
        assert rank["refused"].startswith(f"{SIZE} 2: computing every layer again needs ")
        assert "MiB on rank 0 already, of 2; give " in rank["refused"]


def every_form(*flags):
    """Run a layer in every form from the same random state; return where the bits are equal."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with opened(*flags, *SWAPS) as session:
        run = loop.setup(session)
        policy = policy_of(session)
        policy._step = MEASURING
        engine = next(feature._engine for feature in session._features if feature.name == "adaptive-memory")
        layer, state = policy.layers[-1], torch.get_rng_state()
        tracked = get_cuda_rng_tracker().get_states()
        found = {}
        for form in layer.forms:
            layer.form = form
            torch.set_rng_state(state)
            get_cuda_rng_tracker().set_states({name: kept.clone() for name, kept in tracked.items()})
            for parameter in layer.placed.layer.parameters():
                parameter.grad = None
                parameter.main_grad.zero_()
            x = torch.linspace(-1, 1, 8 * 64).view(8, 1, 64).requires_grad_()
            mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
            engine.begin()
            output = layer.placed.layer(x, mask)[0]
            engine.end(output)
            output.square().sum().backward()
            gradients = [parameter.main_grad.clone() for parameter in layer.placed.layer.parameters()]
            found[form] = [output.detach().clone(), x.grad, *gradients]
        loop.teardown(session)
        del run
    plain = found.pop(NOTHING)
    return {form: all(map(torch.equal, values, plain)) for form, values in found.items()}


def steps_of(run, number):
    """Train steps; return losses and norms, and whether the plan is followed after each."""
    found = []
    for _ in range(number):
        result = run.session.call("train_step", run=run)
        run.iteration += 1
        run.consumed_train_samples += run.args.global_batch_size
        found.append((result.losses["lm loss"], result.grad_norm, policy_of(run.session).plan is not None))
    return found


def resumed(folder):
    """Save a run that follows its plan, go on, and resume it."""
    flags = (*MODEL, SIZE, "100")
    with opened(*flags, "--save", folder) as session:
        run = loop.setup(session)
        found = {"whole": steps_of(run, MEASURING + 1)}
        run.complete_parameters()
        session.call("save_checkpoint", run=run, reason="end")
        found["whole"] += steps_of(run, MEASURING - 2)
        loop.teardown(session)
    with opened(*flags, "--load", folder) as session:
        run = loop.setup(session)
        found["resumed"] = steps_of(run, MEASURING - 2)
        loop.teardown(session)
    return found


def form_cases(folder):
    return every_form(*MODEL), every_form(*EXPERTS), resumed(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_world(form_cases, 1, str(tmp_path_factory.mktemp("saved")))[0]


def test_every_form_of_a_layer_has_equal_bits(alone):
    dense, experts, _ = alone
    assert len(dense) == 5
    assert len(experts) == 4
    assert all(dense.values())
    assert all(experts.values())


def test_a_resumed_run_measures_again_and_trains_the_same(alone):
    whole, again = alone[2]["whole"], alone[2]["resumed"]
    behind = whole[MEASURING + 1 :]
    assert [step[:2] for step in again] == [step[:2] for step in behind]
    assert all(planned for *_, planned in behind)
    assert not any(planned for *_, planned in again)


def plan(*flags):
    line = training_flags(flags, 1, INSTALLED)
    return prepare(line, platform="cpu", registry=INSTALLED, host="standalone").plan


ADAPTIVE = ("--adaptive-recompute-device-swap",)
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
FLASH = ("--use-flash-attn",)


@pytest.mark.parametrize("policy", [ADAPTIVE, ("--adaptive-memory-optimization",)])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (BLOCK, "both say what is computed again; drop one of the two"),
        (("--recompute-norm",), "the plan says what of each layer is computed again"),
        (("--recompute-activation-function",), "mlp-forward"),
        (("--recompute-plan", "decoder"), "recompute-policy"),
        ((*FLASH, "--swap-attention"), "use --adaptive-memory-optimization"),
        (("--swap-activation-plan", "decoder"), "use --adaptive-memory-optimization"),
        (("--compress-activation", "0", "--bf16"), "have nothing to compress"),
        (("--smart-swap",), "recompute-policy"),
        (("--use-torch-fsdp2",), "would count as its activations; use --recompute-plan"),
        ((STEPS, "4"), f"{STEPS} 4 is too short to measure the forms of a layer; use 5 or more"),
        ((SIZE, "0"), f"{SIZE} 0 is no number of MiB; use 1 or more"),
    ],
)
def test_what_a_plan_excludes_is_refused(policy, flags, message):
    with pytest.raises(PlanError) as error:
        plan(*policy, *flags)
    assert message in str(error.value)
    assert any(part in str(error.value) for part in ("--adaptive-", "adaptive-recompute", "adaptive-memory"))


def test_both_policies_are_one_too_many():
    with pytest.raises(PlanError, match="makes the same choice with swapping besides"):
        plan(*ADAPTIVE, "--adaptive-memory-optimization")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ((SIZE, "100"), "adaptive-recompute"),
        (("--auto-recompute-device-size", "100"), "adaptive-recompute"),
        (("--checkpoint-policy", "custom", "--auto-recompute-device-size", "100"), "adaptive-recompute"),
        (("--adaptive-memory-optimization", SIZE, "100"), "adaptive-memory"),
    ],
)
def test_a_size_alone_asks_for_a_plan(flags, name):
    assert [n for n in plan(*flags).names if n.startswith(("adaptive", "checkpoint"))] == [name]


def test_a_run_that_ends_before_its_plan_says_so():
    assert "the run ends after 1 steps" in str(plan(*ADAPTIVE).notes)
