"""Checks of many flags with one registry: what is remembered between them changes no verdict."""

import pytest

from mindspeed_core import Feature, Flag, SessionError, check, hookimpl
from mindspeed_core.registry import Registry

MODEL = (
    "--mock-data --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256 "
    "--position-embedding-type rope --global-batch-size 16 --train-iters 2 --lr 1e-3 --attention-dropout 0"
)
LINES = (
    "--micro-batch-size 1",
    "--micro-batch-size 3",
    "--micro-batch-size 1 --tensor-model-parallel-size 3",
    "--micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel --normalization RMSNorm "
    "--use-fused-rmsnorm",
    "--micro-batch-size 1 --use-fused-rmsnorm",
    "--micro-batch-size 1 --no-such-flag",
    "--micro-batch-size 1 --context-parallel-size 2 --context-parallel-algo ulysses_cp_algo",
)


def verdict(registry, line):
    found = check([*MODEL.split(), *line.split()], world_size=4, platform="cpu", registry=registry)
    return found.problems, found.args and vars(found.args), found.plan and found.plan.digest


def test_a_check_says_the_same_the_second_time():
    registry = Registry.discover()
    first = [verdict(registry, line) for line in LINES]
    assert [verdict(registry, line) for line in LINES] == first
    assert sum(not problems for problems, *_ in first) >= 3


def test_all_stages_that_validation_calls_reach_the_features():
    asked = []

    class Doubling(Feature):
        name = "doubling"
        family = "test"
        summary = "Ask for a tokenizer while validating"
        flags = (Flag("--doubling", help="Ask."),)

        @hookimpl(wrapper=True)
        def build_tokenizer(self):
            result = yield
            asked.append("wrapped")
            return result

        @hookimpl(wrapper=True)
        def validate_arguments(self, session, args):
            result = yield
            session.call("build_tokenizer", args=args)
            session.default("build_tokenizer", args=args)
            assert "doubling" in " ".join(session.implementations("build_tokenizer"))
            return result

    known, counts = Registry.of((Doubling,)), []
    for _ in range(3):
        before = len(asked)
        found = check(
            [*MODEL.split(), "--micro-batch-size", "1", "--doubling"], platform="cpu", registry=known
        )
        assert found.ok, found.problems
        counts.append(len(asked) - before)
    # The first check registers everything, the others what is called.
    assert counts[0] > 0
    assert counts == [counts[0]] * 3


def test_a_feature_that_cannot_be_made_is_refused_every_time():
    class Broken(Feature):
        name = "broken-constructor"
        family = "test"
        summary = "Fail when it is made"
        flags = (Flag("--broken-constructor", help="Fail."),)

        def __init__(self):
            raise OSError("no such device")

    known = Registry.of((Broken,))
    for _ in range(2):
        with pytest.raises(SessionError, match="no such device"):
            check(
                [*MODEL.split(), "--micro-batch-size", "1", "--broken-constructor"],
                platform="cpu",
                registry=known,
            )
