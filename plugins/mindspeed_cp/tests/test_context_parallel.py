"""The feature: sound, free of heavy imports, refused with numbers, proved, exact in its loss."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mindspeed_core.activation import plan_for, prepare
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.run import Batch, Loss
from mindspeed_cp.engine.planners import Grid
from mindspeed_cp.features import DECLARATIONS
from mindspeed_cp.modules.loss import over_the_sequence
from mindspeed_cp.modules.members import group_parts
from mindspeed_cp.options import CPOptions, cp_options
from mindspeed_megatron.loss import loss_of
from mindspeed_testing import run_world
from mindspeed_testing.declared import declaration_faults
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.verify import verify


def test_declarations_are_sound_light_and_on_their_pages():
    assert declaration_faults("mindspeed_cp.features") == []


def prepared(*flags):
    return prepare(
        training_flags(("--hidden-dropout", "0", *flags), 1),
        platform="cpu",
        registry=Registry.of(DECLARATIONS, "mindspeed-cp"),
        host="standalone",
    )


def plan(*flags):
    return prepared(*flags).plan


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context-parallel-algo", "ring"], "megatron_cp_algo"),
        (["--context-parallel-algo", "hamilton_cp_algo"], "computes attention without a mask only"),
        (["--context-parallel-algo", "hybrid_cp_algo"], "--ulysses-degree-in-cp must be specified"),
        (
            ["--context-parallel-algo", "ulysses_cp_algo"],
            "tensor_model_parallel_size (4) < context_parallel_",
        ),
        (
            ["--context-parallel-algo", "hybrid_cp_algo", "--ulysses-degree-in-cp", "3"],
            "--context-parallel-size (8) must be a multiple of --ulysses-degree-in-cp (3)",
        ),
        (["--cp-window-size", "3"], "the ranks of the ring (8) must be a multiple of --cp-window-size (3)"),
        (["--cp-window-size", "8"], "below the ranks of the ring (8), got 8"),
        (
            ["--context-parallel-algo", "kvallgather_cp_algo", "--cp-window-size", "2"],
            "--cp-window-size 2 needs megatron_cp_algo or hybrid_cp_algo",
        ),
        (["--context-parallel-cache-interval", "1"], "needs --context-parallel-kv-cache-policy"),
        (["--context-parallel-cache-interval", "-1"], "must not be negative, got -1"),
        (
            ["--context-parallel-kv-cache-policy", "full", "--context-parallel-cache-interval", "4"],
            "--context-parallel-cache-interval (4) should be smaller than the number of layers (4)",
        ),
        (
            ["--context-parallel-kv-cache-policy", "half", "--context-parallel-algo", "kvallgather_cp_algo"],
            "kvallgather_cp_algo fetches keys again",
        ),
        (["--use-ulysses-allgather-kv"], "--use-ulysses-allgather-kv needs ulysses_cp_algo"),
        (["--cp-fetch-head-groups", "2"], "megatron_cp_algo does not fetch"),
        (["--cp-fetch-head-groups", "0"], "--cp-fetch-head-groups must be at least 1, got 0"),
        (["--use-ulysses-allgather-kv"], "--use-ulysses-allgather-kv needs --group-query-attention"),
    ],
)
def test_what_cannot_work_is_refused_with_the_numbers(flags, message):
    with pytest.raises(PlanError) as error:
        plan("--context-parallel-size", "8", *flags)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        (("--ulysses-degree-in-cp", "2"), "--ulysses-degree-in-cp 2 has no effect: megatron_cp_algo"),
        (
            ("--use-cp-send-recv-overlap", "--context-parallel-algo", "adaptive_cp_algo"),
            "--use-cp-send-recv-overlap has no effect: adaptive_cp_algo has no ring",
        ),
        (
            ("--use-fused-ring-attention-update", "--context-parallel-algo", "kvallgather_cp_algo"),
            "--use-fused-ring-attention-update has no effect: kvallgather_cp_algo",
        ),
    ],
)
def test_what_an_algorithm_does_not_read_is_said_and_stays_off(flags, note):
    found = prepared("--context-parallel-size", "8", *flags)
    assert [note in str(said) for said in found.plan.notes] == [True]
    options = cp_options(found.args)
    assert options.grid.inner == 1
    assert not options.send_receive_overlap
    assert not options.fused_update


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context-parallel-kv-cache-policy", "full"], "context parallel size must be larger than 1"),
        (["--use-ulysses-allgather-kv"], "needs --context-parallel-size larger than 1, got 1"),
    ],
)
def test_what_only_a_split_sequence_has_is_refused_without(flags, message):
    with pytest.raises(PlanError) as error:
        plan(*flags)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("size", "inner", "parts"),
    [(4, 1, [[0, 1, 2, 3]]), (3, 1, None), (4, 2, [[0, 2], [1, 3]])],
)
def test_a_ring_with_an_even_number_of_ranks_gets_a_second_group(size, inner, parts):
    options = CPOptions(Grid(size // inner, inner), send_receive_overlap=True)
    assert group_parts(options).get("cp.second") == parts


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sft",), "--sft packs samples"),
        (("--hybrid-context-parallel",), "--hybrid-context-parallel packs samples"),
    ],
)
def test_what_other_implementations_of_a_script_need_is_refused(flags, message):
    with pytest.raises(PlanError, match=message):
        plan_for(["--context-parallel-size", "2", *flags], host="megatron-lm", platform="cpu")


def test_groups_of_two_levels_of_another_implementation_are_noted():
    flags = ["--context-parallel-size", "2", "--hierarchical-context-parallel-sizes", "1", "2"]
    split, _ = plan_for(flags, host="megatron-lm", platform="cpu")
    assert "context-parallel" in split
    assert any("--ulysses-degree-in-cp" in note.text for note in split.notes)


def test_masks_of_the_data_loader_are_off_where_they_are_the_default():
    split, parsed = plan_for(["--context-parallel-size", "2"], host="megatron-lm", platform="cpu")
    assert "context-parallel" in split
    assert parsed.args.create_attention_mask_in_dataloader is False
    with pytest.raises(PlanError, match="cannot run with --create-attention-mask-in-dataloader"):
        plan("--context-parallel-size", "2", "--create-attention-mask-in-dataloader")


def test_without_a_split_the_feature_is_not_there():
    assert plan().names == ()


@pytest.mark.parametrize(("interval", "layers"), [(0, [1, 2, 3, 4]), (1, [1, 3]), (2, [1, 4])])
def test_an_interval_picks_the_layers_that_keep(interval, layers):
    options = CPOptions(Grid(2), kv_cache="half", cache_interval=interval)
    assert [layer for layer in range(1, 5) if options.kept(layer) == "keys"] == layers


def test_the_options_follow_the_arguments():
    args = plan_for(["--context-parallel-size", "2"], host="standalone", platform="cpu")[1].args
    assert cp_options(args) == cp_options(args)
    assert cp_options(args).grid == Grid(2)
    args.context_parallel_size = 4
    assert cp_options(args).grid == Grid(4)


def uneven_losses():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total, tokens = ((torch.tensor(6.0), 3), (torch.tensor(10.0), 1))[rank]
    found = []
    for per_token in (False, True):
        config = SimpleNamespace(calculate_per_token_loss=per_token)
        run = SimpleNamespace(pg=SimpleNamespace(cp=dist.group.WORLD), config=config)
        found.append(over_the_sequence(run, Loss(total, torch.tensor(tokens), {}), Batch()))
    of_this_rank = loss_of((total / tokens, {}))
    found.append(over_the_sequence(run, of_this_rank, Batch(loss_mask=torch.ones(1, tokens))))
    dist.barrier()
    dist.destroy_process_group()
    mean, per_token, averaged = found
    return (
        float(mean.total / mean.num_tokens),
        float(averaged.total),
        float(per_token.total),
        int(per_token.num_tokens),
    )


def test_the_loss_is_the_mean_over_the_sequence_however_tokens_are_spread():
    found = run_world(uneven_losses, 2)
    # Gradients are averaged over the ranks: so are these.
    assert sum(mean for mean, *_ in found) / 2 == (6.0 + 10.0) / 4
    # megatron-core multiplies what comes as a mean by the number of ranks, and averages it then.
    assert sum(averaged for _, averaged, *_ in found) == (6.0 + 10.0) / 4
    # With the loss per token, sums are divided by sums.
    assert sum(total for *_, total, _ in found) / sum(tokens for *_, tokens in found) == (6.0 + 10.0) / 4


ALWAYS = ("fetched", "context-parallel-tp2-sp", "documents-fetched", "fused", "context-parallel-resume")


@pytest.mark.parametrize(("feature", "scenario"), scenario_parameters(DECLARATIONS, always=ALWAYS))
def test_every_proof_holds(feature, scenario):
    verdict = verify(feature, scenario, platform="cpu")
    assert verdict.passed, verdict


def test_what_is_kept_for_backward_stands_down_where_attention_is_computed_again():
    policy = ("--context-parallel-kv-cache-policy", "full")
    made = plan("--context-parallel-size", "8", *policy, "--recompute-granularity", "selective")
    assert any("computes attention again" in note.text for note in made.notes)
