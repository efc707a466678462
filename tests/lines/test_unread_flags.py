"""No flag of any package is taken without effect unsaid."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_core import Feature, Flag, Registry, Scenario, check
from mindspeed_core.activation import plan_for
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.resolver.index import index_of
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.resolver.remedies import candidates
from mindspeed_testing.contract.flags_read import names_in

MODEL = (
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "4", "--platform", "cpu"),
    *("--vocab-size", "64", "--mock-data", "--lr", "0.001"),
)
TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
EXPERTS = (
    *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm", "--disable-bias-linear"),
)
DEEPSPEED = (*EXPERTS, "--moe-model-type", "deepspeed_moe")

REGISTRY = Registry.discover()
READERS = index_of(REGISTRY, "standalone").readers


def given_flag(feature, flag):
    """Return a flag as it is typed, with a value that is not its default."""
    if flag.is_switch:
        return (flag.name,)
    proven = next((text for text, _ in candidates(feature, flag)), None)
    other = {
        int: str((flag.default or 0) + 1) if isinstance(flag.default, (int, type(None))) else "1",
        float: "0.5",
    }
    value = proven or other.get(flag.type, "x")
    return (flag.name, *[value] * (flag.nargs if isinstance(flag.nargs, int) else 1))


FLAGS = {
    flag.name: (given_flag(record.cls, flag), flag)
    for record in REGISTRY.features.values()
    for flag in record.cls.flags
    if flag.dest in READERS and not (flag.is_switch and flag.default is not bool(flag.inverts))
}
"""Flags that features alone read; without a switch that says its own default."""


def planned(*flags):
    """Return the plan of a model with further flags, or the problems."""
    try:
        return plan_for([*MODEL, *flags], host="standalone", registry=REGISTRY)[0], ()
    except PlanError as error:
        return None, error.problems


ALWAYS = planned()[0].names


def kind_of(flag, plan):
    """Return what became of a given flag: read, noted, held back; empty where nothing says anything."""
    said = [unread for unread in plan.unread if unread.flag == flag.name]
    if said and said[0].held_back:
        return "held back" if said[0].feature in [held.name for held in plan.held_back] else ""
    if said:
        return "noted" if any(str(said[0]) == note.text for note in plan.notes) else ""
    declaring = READERS[flag.dest]
    # A flag may switch off a feature that is on without it.
    return "read" if any(name in plan for name in declaring) or not {*declaring}.isdisjoint(LAYOUT_ON) else ""


LAYOUT_ON = {"vocab-parallel"}
"""Features that a layout switches on, and a flag of theirs off."""


def test_every_flag_of_every_package_is_read_or_noted_or_refused(record_property):
    kinds, unsaid = Counter(), []
    for line, flag in FLAGS.values():
        plan, problems = planned(*line)
        kind = kind_of(flag, plan) if plan is not None else "refused"
        shown = " ".join(map(str, problems))
        if not kind or (plan is None and not any(name in shown for name in (flag.name, *READERS[flag.dest]))):
            unsaid.append(line)
        kinds[kind] += 1
    for kind, count in kinds.items():
        record_property(f"flags of features alone, {kind}", count)

    assert unsaid == []
    assert kinds.total() > 230
    assert min(kinds[kind] for kind in ("read", "noted", "refused")) > 40


LAYOUTS = st.sampled_from([(), TP2, PP2, (*TP2, "--sequence-parallel"), EXPERTS, (*TP2, *EXPERTS)])


@settings(max_examples=150, deadline=None)
@given(LAYOUTS, st.lists(st.sampled_from(sorted(FLAGS)), min_size=1, max_size=4, unique=True))
def test_flags_in_any_company_are_read_or_noted_or_refused(layout, names):
    chosen = [FLAGS[name] for name in names]
    plan, problems = planned(*layout, *(word for line, _ in chosen for word in line))
    if plan is None:
        assert problems
        return
    dests = Counter(flag.dest for _, flag in chosen)
    # Of two flags with one destination the last one counts.
    assert [line for line, flag in chosen if dests[flag.dest] == 1 and not kind_of(flag, plan)] == []


def test_every_flag_of_a_host_is_a_configuration_field_or_read_or_says_that_it_is_not(record_property):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig

    configs = (MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    ours = map(names_in, ("mindspeed_core", "mindspeed_megatron", "mindspeed_train"))
    read = {field.name for config in configs for field in fields(config)}.union(*ours)
    flags = {
        entry.flag.name: entry.flag
        for host in ("standalone", "library")
        for entry in flag_set(REGISTRY, host).entries
        if entry.owner not in REGISTRY.features
    }
    record_property("flags of the core and its hosts", len(flags))
    saying = ("Accepted", "refused")

    assert len(flags) > 400
    assert [
        name
        for name, flag in flags.items()
        if flag.dest not in read and not any(word in flag.help for word in saying)
    ] == []


RECOMPUTED = tuple("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split())
GRID = ("--tp-2d", "--tp-x", "2", "--tp-y", "1")


@pytest.mark.parametrize(
    ("line", "flag", "words"),
    [
        (("--coc-parallel-num", "4"), "--coc-parallel-num", "add --use-ascend-coc"),
        (("--coc-mode", "1"), "--coc-mode", "add --use-ascend-coc"),
        (("--coc-fused-kernel",), "--coc-fused-kernel", "add --use-ascend-coc"),
        (
            (*TP2, "--use-ascend-coc", "--coc-fused-kernel", "--coc-mode", "2"),
            "--coc-mode",
            "--coc-fused-kernel",
        ),
        (("--use-ascend-coc",), "--use-ascend-coc", "--tensor-model-parallel-size 1"),
        (("--tp-x", "2"), "--tp-x", "add --tp-2d"),
        (("--nd1-dim1-size", "2"), "--nd1-dim1-size", "add --tp-2d"),
        ((*TP2, *GRID, "--nd1-dim1-size", "2"), "--nd1-dim1-size", "use --tp-x"),
        (("--enable-overlap-ag-with-matmul",), "--enable-overlap-ag-with-matmul", "add --tp-2d"),
        (("--enable-overlap-matmul-with-rs",), "--enable-overlap-matmul-with-rs", "add --tp-2d"),
        (
            ("--enable-backward-overlap-ag-with-matmul",),
            "--enable-backward-overlap-ag-with-matmul",
            "add --tp-2d",
        ),
        (
            (*TP2, *GRID, "--enable-overlap-ag-with-matmul"),
            "--enable-overlap-ag-with-matmul",
            "--tp-y, which is 1",
        ),
        (
            (*TP2, *GRID, "--enable-overlap-matmul-with-rs"),
            "--enable-overlap-matmul-with-rs",
            "--tp-y, which is 1",
        ),
        ((*TP2, "--sequence-parallel", *DEEPSPEED, "--no-use-rts"), "--no-use-rts", "--moe-router-topk 1"),
        (
            ("--no-recompute-comm-save-gathered",),
            "--no-recompute-comm-save-gathered",
            "add --optimize-recomp",
        ),
        (
            (
                *TP2,
                *RECOMPUTED,
                "--optimize-recomp-communication-level",
                "1",
                "--no-recompute-comm-save-gathered",
            ),
            "--no-recompute-comm-save-gathered",
            "with --sequence-parallel only",
        ),
        (("--pipeline-recompute",), "--pipeline-recompute", "add --pipeline-schedule"),
        ((*PP2, "--pipeline-memory-limit", "2"), "--pipeline-memory-limit", "add --pipeline-schedule"),
        ((*PP2, "--pipeline-w-placement", "greedy"), "--pipeline-w-placement", "add --pipeline-schedule"),
        ((*PP2, "--dualpipev-dw-detach"), "--dualpipev-dw-detach", "add --pipeline-schedule"),
        (
            (*PP2, "--pipeline-schedule", "zb-h1", "--dualpipev-dw-detach"),
            "--dualpipev-dw-detach",
            "the schedule is zb-h1",
        ),
        ((*PP2, "--use-multi-stream"), "--use-multi-stream", "add --pipeline-schedule"),
        (
            (*PP2, "--pipeline-schedule", "1f1b", "--pipeline-times", "1", "2", "1"),
            "--pipeline-times",
            "of 1f1b",
        ),
        (("--swap-modules", "mlp"), "--swap-modules", "add --swap-attention"),
        (("--swap-optimizer-times", "4"), "--swap-optimizer-times", "add --swap-optimizer"),
        (("--reuse-fp32-ties", "sign"), "--reuse-fp32-ties", "add --reuse-fp32-param"),
        (("--swap-min-bytes", "1"), "--swap-min-bytes", "add --swap-activation-plan"),
    ],
)
def test_an_option_without_its_switch_is_data_of_the_verdict_that_names_the_way_out(line, flag, words):
    checked = check([*MODEL, *line], world_size=4, registry=REGISTRY)

    assert checked.ok, checked.problems
    (unread,) = [unread for unread in checked.unread if unread.flag == flag]
    assert words in str(unread)
    assert str(unread) in [note.text for note in checked.plan.notes]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (("--pre-tockens", "8"), "add --use-flash-attn, or drop --pre-tockens"),
        (("--adaptive-cp-manually-set-mask-list",), "add --context-parallel-size"),
    ],
)
def test_an_option_that_decides_what_is_trained_is_refused_without_its_switch(line, words):
    checked = check([*MODEL, *line], registry=REGISTRY)

    (problem,) = checked.problems
    assert (problem.code, problem.flag) == ("E-UNREAD", line[0])
    assert words in problem.remedy


def test_products_in_parts_have_parts_without_further_flags():
    checked = check([*MODEL, *TP2, "--use-ascend-coc"], world_size=2, registry=REGISTRY)

    assert "coc" in checked.plan
    assert checked.args.coc_parallel_num == 2
    assert checked.unread == ()


@pytest.mark.parametrize("line", [("--coc-parallel-num", "1"), ("--coc-mode", "0")])
def test_products_that_are_asked_to_be_whole_are_held_back_with_the_reason(line):
    checked = check([*MODEL, *TP2, "--use-ascend-coc", *line], world_size=2, registry=REGISTRY)

    (held,) = checked.plan.held_back
    assert held.name == "coc"
    assert line[0] in held.reason


def test_a_flag_that_switches_its_feature_off_was_read():
    assert check([*MODEL, *TP2, "--embedding-with-masks"], world_size=2, registry=REGISTRY).unread == ()


class Gate(Feature):
    name = "gate"
    family = "demo"
    summary = "an option of its own, and one of either feature"
    flags = (
        Flag("--gate"),
        Flag("--gate-shape", type=str, default="round", changes_training=True),
        Flag("--gate-width", type=int, default=1),
        Flag("--both", type=int),
    )
    verify = (Scenario("same", flags=("--gate",)),)

    @classmethod
    def unread(cls, args):
        return {"--gate-width": "a round gate has none"} if args.gate_shape == "round" else {}


class Door(Feature):
    name = "door"
    family = "demo"
    summary = "shares an option"
    flags = (Flag("--door"), Flag("--both", type=int))


@pytest.fixture(scope="module")
def toys():
    host = HostDeclaration("bare", "stages without a training", "", ())
    return Registry.of_distributions({"host": ("1", [host]), "acme": ("1", [Gate, Door])})


def unread_of(registry, *flags):
    plan, _ = plan_for(list(flags), host="bare", platform="cpu", registry=registry)
    return {unread.flag: unread for unread in plan.unread}


def test_one_active_feature_that_reads_a_shared_option_is_enough(toys):
    assert unread_of(toys, "--door", "--both", "3") == {}
    assert str(unread_of(toys, "--both", "3")["--both"]) == (
        "--both 3 has no effect: none of door, gate is active; add --door, or add --gate"
    )


def test_a_default_that_is_said_asks_for_nothing(toys):
    assert unread_of(toys, "--gate-width", "1", "--gate-shape", "round") == {}


def test_an_active_feature_says_what_it_does_not_read(toys):
    (unread,) = unread_of(toys, "--gate", "--gate-width", "4").values()

    assert (unread.flag, unread.reason, unread.value) == ("--gate-width", "a round gate has none", "4")
    assert unread_of(toys, "--gate", "--gate-width", "4", "--gate-shape", "square") == {}


def test_what_decides_the_training_is_a_problem_without_its_reader(toys):
    with pytest.raises(PlanError, match="nothing reads it: gate is not active") as caught:
        unread_of(toys, "--gate-shape", "square")

    assert caught.value.problems[0].remedy == "add --gate, or drop --gate-shape"


def test_flags_of_a_feature_that_is_held_back_are_data_and_no_further_note(toys):
    plan, _ = plan_for(
        ["--gate", "--gate-shape", "square", "--optimization-level", "0"],
        host="bare",
        platform="cpu",
        registry=toys,
    )

    assert [unread.flag for unread in plan.unread] == ["--gate", "--gate-shape"]
    assert all(unread.held_back for unread in plan.unread)
    assert plan.notes == ()
