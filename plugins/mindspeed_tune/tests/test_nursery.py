"""The next rank finds what one rank imported, and is changed in nothing by it."""

import sys
from dataclasses import replace

import pytest

from mindspeed_tune import nursery
from mindspeed_tune.driver import Ranks
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.rank_process import _imported
from mindspeed_tune.warm_process import WarmProcess

COMMAND = (
    "mindspeed-train --fake-world-size 2 --mock-data --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --vocab-size 256 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --bf16 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3 "
    "--attention-dropout 0 --use-fused-rmsnorm --use-fused-rotary-pos-emb --tensor-model-parallel-size 2"
)
TRAINED = {"command": {"kind": "train"}}


@pytest.mark.thorough
@pytest.mark.parametrize("platform", ["fake", "fake-cuda"])
def test_a_rank_behind_others_has_the_record_of_the_first_one(platform):
    with WarmProcess(platform, parallel=1) as process:
        with Ranks(read_command(COMMAND.split(), {}), process=process, reliefs=False) as ranks:
            [first] = ranks.run([0])
            [second] = ranks.run([0])
    assert replace(second, cost={}) == replace(first, cost={})
    assert second.cost["reserved_ratio"] == first.cost["reserved_ratio"]


def test_modules_of_users_and_of_scripts_are_not_handed_on(monkeypatch):
    before = {"mindspeed_core": None}
    monkeypatch.setattr(sys, "modules", {**before, "mindspeed_core.late": None, "users": None})
    assert _imported(TRAINED, before) == ["mindspeed_core.late"]
    assert _imported({"command": {"kind": "script"}}, before) == []


def test_a_module_that_cannot_be_imported_is_left_to_those_who_need_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    nursery._import_too(["no_such_package.module", "colorsys"])
    assert "colorsys" in sys.modules
