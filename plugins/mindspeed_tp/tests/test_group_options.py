"""Sizes and modes of communicators: read, checked, computed, and given to the groups they name."""

import pytest

from mindspeed_core.activation import activate, plan_for, prepare
from mindspeed_core.errors import RefusedValue, UserError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_testing.model_flags import training_flags
from mindspeed_tp.features.grid_proofs import grid
from mindspeed_tp.features.proofs import MODEL, SP, TP2
from mindspeed_tp.group_options import check_names
from mindspeed_tp.group_sizes import adaptive_sizes, buffer_sizes, expansion_modes, group_numbers

INSTALLED = Registry.discover()
SIZES = ("--hccl-group-buffer", "dp:200;tp:300;exp:400")
LARGE = (
    *("--seq-length", "8192", "--hidden-size", "4096", "--num-attention-heads", "32", "--bf16"),
    *("--ffn-hidden-size", "16384", "--max-position-embeddings", "8192", "--micro-batch-size", "1"),
)


def planned(*flags, ranks=4):
    line = training_flags((*MODEL, *flags), ranks, INSTALLED)
    return prepare(line, platform="cpu", registry=INSTALLED, host="standalone")


@pytest.mark.parametrize("text", ["dp:200;tp:300;exp:400", " dp : 200 ; tp:300,exp:400; "])
def test_groups_are_read_with_their_numbers_by_their_names_here(text):
    assert group_numbers(text) == (("dp", 200), ("tp", 300), ("ep", 400))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "'tp' is no group with a positive whole number, such as tp:200"),
        ("tp:0", "'tp:0' is no group with a positive"),
        ("tp:-5", "'tp:-5' is no group with a positive"),
        ("tp:2.5", "'tp:2.5' is no group with a positive"),
        ("tp:1:2", "'tp:1:2' is no group with a positive"),
        ("tq:200", "'tq' is no group; groups are dp, dp_cp"),
        ("exp:1;ep:2", "'ep' is given twice"),
        (";", "names no group"),
    ],
)
@pytest.mark.parametrize("flag", ["--hccl-group-buffer", "--hccl-op-mode"])
def test_what_is_no_list_of_groups_is_refused_before_training(flag, text, message):
    with pytest.raises(RefusedValue, match="^" + message.replace(".", r"\.")):
        group_numbers(text)
    with pytest.raises(PlanError) as error:
        planned(flag, text)
    assert flag in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("host", ["standalone", "library", "megatron-lm"])
def test_other_devices_accept_the_flags_and_say_that_nothing_changes(host):
    flags = (*SIZES, "--hccl-group-buffer-adaptive", "--hccl-op-mode", "tp:3")
    made, _ = plan_for(
        [*MODEL[2:], *LARGE, "--num-layers", "2", *TP2, *flags],
        platform="cpu",
        host=host,
        registry=INSTALLED,
    )
    assert "hccl-group-options" not in made.names
    assert any(
        held.name == "hccl-group-options" and "only NPUs have" in held.reason for held in made.held_back
    )


def test_adaptive_sizes_are_those_of_the_largest_messages():
    args = planned(*LARGE, *TP2, *SP, "--hccl-group-buffer-adaptive").args
    found = adaptive_sizes(args)
    # 8192 rows of 4096 numbers of two bytes; half of the rows on each rank between pipeline stages.
    assert (found["tp"], found["pp"], found["pp.up"], found["mp"]) == (64, 32, 32, 10)
    without_sp = adaptive_sizes(planned(*LARGE, *TP2, "--hccl-group-buffer-adaptive").args)
    assert (without_sp["tp"], without_sp["pp"]) == (128, 64)
    assert "ep" not in found


def test_adaptive_sizes_of_a_grid_are_those_of_its_two_groups():
    found = adaptive_sizes(planned(*LARGE, *grid(2, 2), "--hccl-group-buffer-adaptive").args)
    # Rows of half the hidden state over x; of half of both halves of the feed-forward module over y.
    assert (found["tp2d.x"], found["tp2d.y"]) == (32, 256)


def test_experts_get_a_size_where_their_load_is_known():
    experts = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-token-dispatcher-type", "alltoall")
    flags = (*LARGE, *TP2, *SP, *experts, "--hccl-group-buffer-adaptive")
    assert "ep" not in adaptive_sizes(planned(*flags).args)
    factor = ("--hccl-ep-group-buffer-adaptive-factor", "1.5")
    assert adaptive_sizes(planned(*flags, *factor).args)["ep"] == 96


def test_a_given_size_comes_before_an_adaptive_one():
    args = planned(*LARGE, *TP2, "--hccl-group-buffer-adaptive", *SIZES, "--hccl-op-mode", "tp:3").args
    assert buffer_sizes(args)["tp"] == 300
    assert buffer_sizes(args)["pp"] == 64
    assert expansion_modes(args) == {"tp": 3}


def test_a_group_that_a_feature_creates_is_a_name():
    with activate([], platform="cpu") as session:
        check_names(session, {"--hccl-group-buffer": {"tp": 3}})
        with pytest.raises(UserError, match=r"names tp2d\.x, which .*groups of features are none"):
            check_names(session, {"--hccl-group-buffer": {"tp2d.x": 3}})
