"""Input of finetuning that is refused before anything is trained: flags that nothing computes."""

import pytest

from mindspeed_core.registry import Registry
from mindspeed_core.validation import check
from mindspeed_testing.model_flags import training_flags

INSTALLED = Registry.discover()
ADAPTERS = ("--lora-target-modules", "linear_qkv")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((*ADAPTERS, "--fp8-format", "hybrid"), ["lora", "--fp8-format", "8 bits"]),
        ((*ADAPTERS, "--lora-r", "x"), ["--lora-r", "'x'"]),
        (("--pack-samples",), ["--is-instruction-dataset"]),
        (
            ("--is-instruction-dataset", "--data-path", "x", "--num-experts", "4", "--mtp-num-layers", "1"),
            ["--mtp-num-layers"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_flag_is_refused_by_name_with_a_way_out(flags, named):
    checked = check(training_flags(flags, 1, INSTALLED), registry=INSTALLED)
    said = "\n".join(map(str, checked.problems))
    assert not checked.ok
    assert all(text in said for text in named), said
    assert all(problem.remedy or problem.reason for problem in checked.problems)


def test_the_fused_permutation_stands_down_beside_instruction_data():
    flags = (
        *("--is-instruction-dataset", "--data-path", "x", "--num-experts", "4", "--moe-grouped-gemm"),
        *("--moe-permute-fusion", "--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear"),
    )
    checked = check(training_flags(flags, 1, INSTALLED), registry=INSTALLED)
    assert checked.ok, [str(problem) for problem in checked.problems]
    assert checked.args.moe_permute_fusion is False
    assert "moe-permute-fusion" not in checked.plan.names
    assert "--moe-permute-fusion" in "".join(note.text for note in checked.plan.notes)
    assert [held.name for held in checked.plan.held_back] == ["moe-permute-fusion"]
