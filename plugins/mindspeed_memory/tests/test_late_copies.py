"""Memory features on a device whose copies are late, beside each other: the same training, or a refusal."""

from contextlib import nullcontext

import pytest
import torch

from mindspeed_core.activation import prepare
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_megatron.unwrap import unwrap
from mindspeed_memory.recompute.layers import layers_of
from mindspeed_memory.saved.host_copy import HostCopies
from mindspeed_testing import run_world
from mindspeed_testing.lagging.findings import LaggingDeviceError
from mindspeed_testing.lagging.planting import PlantedFault, planted
from mindspeed_testing.lagging.runs import Training, outcomes
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

SMALL = ("--global-batch-size", "2", "--swap-min-bytes", "1")
PLAIN = ("--hidden-dropout", "0.1", "--num-layers", "3")
GATED = (*PLAIN, "--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope")
FLASH = (*GATED, "--use-flash-attn")
LATENT = (
    *(*GATED, "--multi-latent-attention", "--q-lora-rank", "16", "--kv-lora-rank", "16"),
    *("--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--use-flash-attn"),
)
EXPERTS = (
    *(*PLAIN, "--swiglu", "--disable-bias-linear", "--num-experts", "4", "--moe-router-topk", "2"),
    *("--moe-ffn-hidden-size", "32", "--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"),
)
PLAN = ("--swap-activation-plan", "decoder.layers.{0-2}")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
DROPPING = {
    "plan of layers, norms computed again": (PLAIN, (*PLAN, "--recompute-norm")),
    "swapped feed-forward parts, activations computed again": (
        FLASH,
        ("--swap-attention", "--swap-modules", "mlp", "--recompute-activation-function"),
    ),
    "smart swap, norms computed again": (PLAIN, ("--smart-swap", "--recompute-norm")),
    "smart swap, activations computed again": (GATED, ("--smart-swap", "--recompute-activation-function")),
    "plan of layers, activations of experts computed again": (EXPERTS, (*PLAN, *SELECTIVE, "moe_act")),
    "swapped attention, latent projections computed again": (
        LATENT,
        ("--swap-attention", *SELECTIVE, "mla_up_proj"),
    ),
}
# A norm of plain operations, computed again, adds gradients in another order.
PREDICTING = (*FLASH, "--use-fused-rmsnorm", "--mtp-num-layers", "1")
PREDICTED = {
    name: (PREDICTING, flags)
    for name, flags in {
        "feed-forward parts with biases": (*SELECTIVE, "mlp"),
        "norms": ("--recompute-norm",),
        "activations": ("--recompute-activation-function",),
        "swapped": ("--swap-attention",),
        "smart swap": ("--smart-swap",),
    }.items()
}
PREDICTED["compressed"] = ((*PREDICTING, "--bf16"), ("--compress-activation", "0"))
USELESS = {
    "swapped inputs of second products, activations computed again": (
        GATED,
        (
            *("--swap-activation-plan", "decoder.layers.{0-2}.mlp.linear_fc2"),
            "--recompute-activation-function",
        ),
    ),
    "compressed first products, feed-forward parts computed again": (
        (*GATED, "--bf16"),
        ("--compress-dense", "level0", "--recompute-plan", "decoder.layers.*.mlp"),
    ),
}


def compared(cases, steps):
    """Return how each case ended beside the same model without it."""
    models = list(dict.fromkeys(model for model, _ in cases.values()))
    plain = [Training((*SMALL[:2], *model), steps) for model in models]
    beside = [Training((*SMALL, *model, *flags), steps) for model, flags in cases.values()]
    (found,) = run_world(outcomes, 1, (*plain, *beside), timeout=280)
    baselines = dict(zip(models, found))
    assert not [outcome.error for outcome in baselines.values() if outcome.error]
    return {
        name: (outcome, baselines[model])
        for (name, (model, _)), outcome in zip(cases.items(), found[len(models) :])
    }


@pytest.fixture(scope="module")
def of_dropping(asked_for):
    asked = asked_for("case")
    return compared({case: found for case, found in DROPPING.items() if case in asked}, 5)


@pytest.mark.parametrize("case", DROPPING)
def test_swapping_beside_what_is_dropped_trains_the_same(of_dropping, case):
    outcome, baseline = of_dropping[case]
    assert not outcome.error, outcome.error
    assert outcome == baseline


@pytest.fixture(scope="module")
def of_nothing():
    return compared(USELESS, 1)


@pytest.mark.parametrize("case", USELESS)
def test_what_would_do_nothing_is_refused(of_nothing, case):
    outcome, _ = of_nothing[case]
    flag = USELESS[case][1][0]
    assert outcome.error.startswith(f"UserError: {flag}: nothing is left to ")


@pytest.fixture(scope="module")
def of_predicting(asked_for):
    asked = asked_for("case")
    return compared({case: found for case, found in PREDICTED.items() if case in asked}, 4)


@pytest.mark.parametrize(
    "case",
    [case if n < 2 else pytest.param(case, marks=pytest.mark.thorough) for n, case in enumerate(PREDICTED)],
)
def test_layers_that_predict_further_tokens_train_the_same(of_predicting, case):
    outcome, baseline = of_predicting[case]
    assert not outcome.error, outcome.error
    assert outcome == baseline


def switched(flags):
    """Return how many layers there are, and the names of those of which the norms are computed again."""
    session = prepare([*training_flags((*PREDICTING, *flags), 2)], host=DEFAULT_HOST, platform="cpu")
    with session:
        run = loop.setup(session)
        chunk = unwrap(run.model[0])
        names = {id(module): name for name, module in chunk.named_modules()}
        visited = [names[id(placed.layer)] for placed in layers_of(run.model)]
        norms = {n for n, m in chunk.named_modules() if getattr(m, "recompute_input_layernorm", False)}
        dense = {n for n, m in chunk.named_modules() if getattr(m, "recompute_mlp", False)}
        loop.teardown(session)
    return visited, norms, dense


def switches():
    return [
        switched(flags) for flags in ((*SELECTIVE, "layernorm"), (*SELECTIVE, "mlp"), ("--recompute-norm",))
    ]


def test_the_walk_over_layers_visits_all_that_megatron_core_switches():
    ((visited, theirs, _), (_, _, dense), (_, ours, _)) = run_world(switches, 1)[0]
    assert len(visited) == len(set(visited)) == 4
    assert set(visited) == theirs == ours
    # megatron-core's own checkpoint of a feed-forward part with biases never ends.
    assert not dense


EARLY = {
    "the memory goes while it is written": (
        PlantedFault(
            "mindspeed_memory.saved.host_copy",
            "            self._copies.platform.current_stream().wait_event(read)\n",
            "            pass\n",
        ),
        "freed while in use",
    ),
    "its buffer is written while it is read": (
        PlantedFault(
            "mindspeed_memory.saved.host_copy",
            "            copies.away.wait_event(free)\n",
            "            pass\n",
        ),
        "written without a wait",
    ),
}


def fetched_and_dropped():
    """Return what a late device says of what is fetched and not read, without and with each fault."""
    told = []
    for context in (nullcontext(), *(planted(fault) for fault, _ in EARLY.values())):
        try:
            with context, prepare([*training_flags((), 2)], host=DEFAULT_HOST, platform="lagging") as session:
                loop.setup(session)
                copies = HostCopies(session.platform)
                kept = copies(torch.ones(4096))
                kept.release()
                kept.fetch()
                del kept
                torch.zeros(4096).add_(1.0)
                # The compute stream has waited for the buffer, this one has not.
                with session.platform.use_stream(session.platform.stream()):
                    copies(torch.ones(4096)).flat().sum()
                loop.teardown(session)
        except LaggingDeviceError as error:
            told.append(str(error))
        else:
            told.append("")
    return told


def test_what_was_fetched_and_never_read_is_given_away_behind_its_copy():
    ((without, *with_faults),) = run_world(fetched_and_dropped, 1)
    assert without == ""
    assert [rule in text for (_, rule), text in zip(EARLY.values(), with_faults)] == [True] * len(EARLY), (
        with_faults
    )
