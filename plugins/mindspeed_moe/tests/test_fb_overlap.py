"""Two micro-batches side by side: the order of their work, what stays exposed, what they keep, refusals."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch

from mindspeed_core.activation import plan_for
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_moe.features import ForwardBackwardOverlap
from mindspeed_moe.features.fb_overlap_proofs import INTERLEAVED, PAIRED
from mindspeed_moe.features.proofs import EP2, GATHERED, MODEL, OVERLAP, SHARED
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags

THREE = (*MODEL, *EP2, *SHARED, "--num-layers", "1", "--global-batch-size", "6", "--micro-batch-size", "1")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
BESIDE = (
    *("B combine launch", "B shared fc2"),
    *("F attention", "F dispatch launch", "F probs launch", "F shared fc1"),
    *("B combine wait", "B gmm2 dx", "B gmm1 dx", "B probs launch", "B dispatch launch", "B shared fc1"),
    *("B gmm2 dW", "B gmm1 dW"),
    *("F dispatch wait", "F probs wait", "F gmm1", "F gmm2", "F combine launch", "F shared fc2"),
    *("B probs wait", "B dispatch wait", "B attention"),
    "F combine wait",
)
UNITS = {"attention": 4, "gmm1": 2, "gmm2": 2, "dx": 2, "dW": 2, "fc1": 1, "fc2": 1}
BACKWARD_UNITS = UNITS | {"attention": 8, "fc1": 2, "fc2": 2}
TRAVEL = {"dispatch": 4, "combine": 4, "probs": 0}


def noting_attention(stack, found):
    """Record attention among the events, in both directions."""
    from megatron.core.transformer.attention import SelfAttention

    forward = SelfAttention.forward

    def noting(self, *args, **options):
        found.events.append("F attention")
        output, bias = forward(self, *args, **options)
        output.register_hook(lambda gradient: found.events.append("B attention"))
        return output, bias

    stack.enter_context(patch.object(SelfAttention, "forward", noting))


def noting_micro_batches(stack, living):
    """Record how many micro-batches are between their forward and the end of their backward pass."""
    from mindspeed_moe.paired_schedule import ForwardStep

    forward, backward = ForwardStep.forward, ForwardStep.backward

    def begins(self):
        living.append(living[-1] + 1)
        return forward(self)

    def ends(self, gradient):
        backward(self, gradient)
        living.append(living[-1] - 1)

    stack.enter_context(patch.object(ForwardStep, "forward", begins))
    stack.enter_context(patch.object(ForwardStep, "backward", ends))


def recorded_with_attention(flags):
    import recorded_steps

    living = [0]
    with ExitStack() as stack:
        found = recorded_steps.Recorded()
        stack.enter_context(patch.object(recorded_steps, "Recorded", lambda: found))
        noting_attention(stack, found)
        noting_micro_batches(stack, living)
        recorded_steps.recorded(flags)
    return found, living


def another_schedule():
    """Hand the feature a schedule that pairs nothing, and look at the option that it sets."""
    from mindspeed_core.activation import activate
    from mindspeed_core.errors import UserError
    from mindspeed_moe.paired_schedule import PairedSchedule
    from mindspeed_train import loop

    said, options = [], []
    with activate(training_flags((*THREE, *PAIRED), 1), host="standalone") as session:
        run = loop.setup(session)

        def one_after_the_other(*, forward_step_func, model, **rest):
            options.append(run.config.overlap_moe_expert_parallel_comm)
            if rest["forward_only"]:
                return "evaluated"
            return forward_step_func(None, model[0])

        paired = PairedSchedule(session, one_after_the_other)
        for chunks in (run.model, [torch.nn.Linear(1, 1)]):
            chunks[0].config = run.config
            try:
                paired(forward_step_func=None, model=chunks, forward_only=False)
            except UserError as error:
                said.append(str(error))
        said.append(paired(forward_step_func=None, model=run.model, forward_only=True))
        options.append(run.config.overlap_moe_expert_parallel_comm)
        loop.teardown(session)
    return said, options


def train_all():
    from recorded_steps import recorded

    return {
        "paired": recorded_with_attention((*THREE, *PAIRED)),
        "alone": recorded_with_attention((*THREE, *OVERLAP)),
        "crowded": recorded((*THREE, *SHARDED, *PAIRED), steps=2, crowded=True),
        "crowded plain": recorded((*THREE, *SHARDED), steps=2, crowded=True),
        "another schedule": another_schedule(),
    }


@pytest.fixture(scope="module")
def ranks():
    return run_world(train_all, 2)


def steady(events):
    """Return the events from the first backward pass to the end of the last forward pass."""
    first = next(at for at, event in enumerate(events) if event.startswith("B"))
    last = max(at for at, event in enumerate(events) if event.startswith("F"))
    return tuple(events[first : last + 1])


def exposed(events):
    """Return how long exchanges are waited for, where one link carries them in the order of launches."""
    clock = free = waited = 0
    arrives = {}
    for event in events:
        direction, what, *rest = event.split()
        exchange = direction, what
        if rest == ["launch"]:
            free = arrives[exchange] = max(clock, free) + TRAVEL[what]
        elif rest == ["wait"]:
            arrival = arrives.pop(exchange, clock)
            waited += max(0, arrival - clock)
            clock = max(clock, arrival)
        else:
            clock += (BACKWARD_UNITS if direction == "B" else UNITS)[[what, *rest][-1]]
    return waited


def test_each_exchange_travels_while_the_other_micro_batch_computes(ranks):
    for rank in ranks:
        found, _ = rank["paired"]
        assert steady(found.events) == (*BESIDE, *BESIDE)


def test_the_steady_state_hides_what_one_micro_batch_alone_cannot(ranks):
    for rank in ranks:
        alone = rank["alone"][0].events
        assert exposed(steady(rank["paired"][0].events)) == 0
        assert exposed(alone) == 3 * (3 + 3 + 2)
        assert exposed(rank["paired"][0].events) < exposed(alone) / 2


def test_two_micro_batches_live_at_most(ranks):
    for rank in ranks:
        _, living = rank["paired"]
        assert max(living) == 2
        assert living[-1] == 0


def test_no_handle_outlives_its_wait(ranks):
    assert [rank["paired"][0].kept for rank in ranks] == [0, 0]


def test_a_rank_without_rows_takes_part_and_trains_the_same(ranks):
    assert sum(ranks[1]["crowded"].rows[0][1]) == 0
    for rank in ranks:
        ours, plain = rank["crowded"], rank["crowded plain"]
        assert ours.losses == plain.losses
        assert [
            name for name, value in ours.parameters.items() if not torch.equal(value, plain.parameters[name])
        ] == []


def test_a_schedule_or_model_that_pairs_nothing_is_refused(ranks):
    for rank in ranks:
        said, _ = rank["another schedule"]
        assert "the pipeline schedule another_schedule.<locals>.one_after_the_other runs no two" in said[0]
        assert "pairs micro-batches of GPTModel, and this model is Linear; drop the flag" in said[1]


def test_megatron_cores_option_is_set_for_training_schedules_alone(ranks):
    for rank in ranks:
        said, options = rank["another schedule"]
        assert said[-1] == "evaluated"
        assert options == [True, False, False]


INSTALLED = Registry.discover()


def plan(*flags, host="standalone"):
    return plan_for(training_flags(flags, 1, INSTALLED), platform="cpu", host=host, registry=INSTALLED)[0]


def without(flag, *, values=1):
    at = MODEL.index(flag)
    return (*MODEL[:at], *MODEL[at + 1 + values :])


PP2 = ("--pipeline-model-parallel-size", "2")
AGAIN = ("--recompute-granularity", "selective", "--recompute-modules")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((*MODEL, *PAIRED), "--expert-model-parallel-size 1 has no communication to hide; use 2 or more"),
        ((*without("--moe-grouped-gemm", values=0), *EP2, *PAIRED), "add --moe-grouped-gemm"),
        ((*GATHERED, *EP2, *PAIRED), "it is the all-to-all that is hidden"),
        (PAIRED, "without experts no token travels"),
        ((*MODEL, *EP2, *PAIRED, *OVERLAP), "layer-schedule"),
        (
            (*MODEL, *EP2, *PAIRED, *PP2),
            "--pipeline-model-parallel-size 2 and one model chunk per rank has no forward and backward pass "
            "to run side by side; use 1, virtual stages (--num-layers-per-virtual-pipeline-stage), or "
            "--schedules-method dualpipev of mindspeed-pp",
        ),
        (
            (*MODEL, *EP2, *PAIRED, *PP2, "--num-layers-per-virtual-pipeline-stage", "1"),
            "one model chunk per rank",
        ),
        ((*MODEL, *EP2, *PAIRED, *AGAIN, "moe"), "--recompute-modules moe computes again"),
        ((*MODEL, *SHARED, *EP2, *PAIRED, *AGAIN, "shared_experts"), "drop it from --recompute-modules"),
        (
            (*MODEL, *EP2, *PAIRED, "--use-megatron-fsdp"),
            "which is not active: --use-megatron-fsdp shards the weights of each expert",
        ),
        (
            (*MODEL, *EP2, "--moe-unperm2-mem-optim"),
            "--moe-unperm2-mem-optim is an option of --moe-fb-overlap",
        ),
        (
            (*MODEL, *EP2, "--moe-unperm2-mem-optim-swap"),
            "--moe-unperm2-mem-optim-swap is an option of --moe-fb-overlap",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(flags, message):
    with pytest.raises(PlanError) as error:
        plan(*flags)
    assert message in str(error.value)


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
@pytest.mark.parametrize("flag", ["--moe-unperm2-mem-optim", "--moe-unperm2-mem-optim-swap"])
def test_every_host_takes_the_flags_and_says_which_change_nothing(host, flag):
    made, _ = plan_for([*MODEL[2:], *EP2, *PAIRED, flag], platform="cpu", host=host, registry=INSTALLED)
    assert ForwardBackwardOverlap.name in made.names
    (said,) = made.notes
    assert f"{flag} has no effect: probabilities are applied before" in str(said)


def test_it_stands_down_where_whole_layers_are_recomputed():
    made = plan(*MODEL, *EP2, *PAIRED, *FULL)
    assert ForwardBackwardOverlap.name not in made.names
    assert any("whole layers, whose all-to-all nothing hides" in str(held) for held in made.held_back)


def test_virtual_stages_and_smaller_experts_in_memory_are_taken():
    assert ForwardBackwardOverlap.name in plan(*MODEL, *EP2, *PAIRED, *INTERLEAVED).names
    assert "moe-zero-memory" in plan(*MODEL, *EP2, *PAIRED, "--moe-zero-memory", "level0").names
