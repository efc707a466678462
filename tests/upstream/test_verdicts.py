"""Flags of launch scripts written for another program: noted, ignored when asked to, or refused."""

import json
import shlex
from functools import lru_cache

import pytest

from mindspeed_core.activation import plan_for, prepare
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_megatron.flag_notes import lines
from mindspeed_megatron.upstream.table import VERDICTS, verdict_on
from mindspeed_megatron.upstream.translations import TRANSLATIONS
from mindspeed_megatron.upstream.verdicts import NOTED, REFUSED

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1"
HARMLESS = (
    "--distributed-backend nccl --use-mcore-models --dist-ckpt-strictness log_all --logging-level 40 "
    "--auto-detect-ckpt-format --ckpt-fully-parallel-load --ckpt-assume-constant-structure --log-progress "
    "--rerun-mode validate_results --enable-experimental"
)


@lru_cache
def known(host):
    return flag_set(Registry.discover(), host)


def parse(text, host="standalone"):
    return known(host).parse(shlex.split(text))


def flags_noted(parsed):
    return [note.flag for note in parsed.flag_notes]


def test_a_flag_that_says_what_is_the_case_is_noted_with_its_value():
    parsed = parse("--distributed-backend nccl --num-layers 3")
    assert parsed.problems == ()
    assert flags_noted(parsed) == ["--distributed-backend nccl"]
    assert parsed.args.num_layers == 3


@pytest.mark.parametrize("host", ["standalone", "library"])
def test_every_host_reads_the_same_table(host):
    assert flags_noted(parse("--distributed-backend hccl", host)) == ["--distributed-backend hccl"]


def test_a_host_uses_what_it_has_itself():
    parsed = parse("--distributed-backend nccl --no-shared-storage", "megatron-lm")
    assert flags_noted(parsed) == ["--no-shared-storage"]
    assert parsed.args.distributed_backend == "nccl"


@pytest.mark.parametrize("key", ["distributed-backend", "--distributed-backend", "distributed_backend"])
def test_a_dictionary_is_read_by_the_same_table(key):
    parsed = known("library").parse_mapping({key: "nccl", "num_layers": 3})
    assert parsed.problems == ()
    assert flags_noted(parsed) == ["--distributed-backend nccl"]
    assert parsed.args.num_layers == 3


def test_a_switch_that_a_dictionary_turns_off_is_not_given():
    parsed = known("library").parse_mapping({"use_mcore_models": False})
    assert (parsed.problems, parsed.flag_notes) == ((), ())


def test_a_noted_switch_with_a_value_is_refused():
    (problem,) = parse("--use-mcore-models yes").problems
    assert "takes no value" in problem.reason


def test_ten_harmless_flags_take_one_line():
    notes = parse(HARMLESS).flag_notes
    assert len(notes) == 10
    (line,) = lines(notes, explain=False)
    assert line.startswith("10 flags change nothing here: --distributed-backend, ")
    assert "and 6 more" in line
    assert "--explain" in line


def test_explain_says_why_for_each():
    said = list(lines(parse(HARMLESS).flag_notes, explain=True))
    assert len(said) == 10
    assert said[0].startswith("--distributed-backend nccl changes nothing here: the platform names the")


def test_the_plan_carries_the_notes_and_its_digest_does_not():
    without, _ = plan_for(shlex.split(MODEL), host="standalone", platform="cpu")
    plan, _ = plan_for(shlex.split(f"{MODEL} {HARMLESS}"), host="standalone", platform="cpu")
    assert len(plan.flag_notes) == 10
    assert plan.digest == without.digest


def test_a_flag_nobody_knows_is_ignored_when_asked_to():
    (problem,) = parse("--no-such-flag 3").problems
    assert problem.reason == "no such flag"
    parsed = parse("--no-such-flag 3 --ignore-unknown-args")
    assert parsed.problems == ()
    assert flags_noted(parsed) == ["--no-such-flag 3"]


def test_ignoring_what_is_unknown_ignores_no_refusal():
    (problem,) = parse("--yaml-cfg x.yaml --ignore-unknown-args").problems
    assert problem.flag == "--yaml-cfg"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--rl-use-sequence-packing", "reinforcement learning"),
        ("--num-classes 3", "vision models"),
        ("--use-nccl-ub", "user buffers"),
        ("--stage dpo", "no preferences"),
        ("--pack", "would attend to one another"),
        ("--enable-mg2hf-convert", "after a training"),
        ("--enable-mhc", "hyper-connections"),
        ("--use-triton-gdn", "gated delta nets"),
        ("--outer-dp-sharding-strategy optim", "all data-parallel ranks at once"),
    ],
)
def test_what_would_train_something_else_is_refused_with_a_way_out(flags, says):
    (problem,) = parse(flags).problems
    assert says in problem.reason
    assert problem.remedy


def test_a_value_that_is_the_case_is_noted_where_others_are_refused():
    assert parse("--outer-dp-sharding-strategy no_shard").problems == ()
    assert parse("--error-injection-type transient_error --error-injection-rate 100").problems == ()
    assert parse("--error-injection-type persistent_error").problems != ()


HOSTS = ("standalone", "megatron-lm", "library")


def plain_options(kind):
    """Return each option of a kind of verdict, with the first value that it is about."""
    for verdict in VERDICTS:
        for option in verdict.options:
            if (
                verdict.kind == kind
                and "*" not in option
                and verdict_on(option, verdict.values[:1]) is verdict
            ):
                yield option, verdict


def judged_alike(host, kind, value):
    """Return the verdicts of a kind on what a host does not declare, and all of them read at once."""
    flags = known(host)
    verdicts = {
        option: verdict
        for option, verdict in plain_options(kind)
        if option not in flags and option not in TRANSLATIONS
    }
    words = [
        word
        for option, verdict in verdicts.items()
        for word in (option, *(verdict.values[:1] or ([value] if kind == REFUSED else [])))
    ]
    mapping = {
        option.removeprefix("--").replace("-", "_"): verdict.values[0] if verdict.values else value
        for option, verdict in verdicts.items()
    }
    return verdicts, (flags.parse(words), flags.parse_mapping(mapping))


@pytest.mark.parametrize("host", HOSTS)
def test_each_note_holds_in_each_host_for_lines_and_dictionaries(host):
    verdicts, readings = judged_alike(host, NOTED, True)
    for parsed in readings:
        assert parsed.problems == ()
        found = {note.flag.partition(" ")[0]: note.reason for note in parsed.flag_notes}
        assert found == {option: verdict.reason for option, verdict in verdicts.items()}


@pytest.mark.parametrize("host", HOSTS)
def test_each_refusal_holds_in_each_host_for_lines_and_dictionaries(host):
    verdicts, readings = judged_alike(host, REFUSED, "7")
    for parsed in readings:
        found = {problem.flag: problem.remedy for problem in parsed.problems}
        assert found == {option: verdict.remedy for option, verdict in verdicts.items()}


def test_every_verdict_has_a_reason_and_every_refusal_a_way_out():
    assert {verdict.kind for verdict in VERDICTS} == {NOTED, REFUSED}
    assert all(verdict.reason and verdict.options for verdict in VERDICTS)
    assert all(bool(verdict.remedy) == (verdict.kind == REFUSED) for verdict in VERDICTS)


@pytest.mark.parametrize(
    ("flags", "dest", "value", "note"),
    [
        ("--transformer-impl transformer_engine", "transformer_impl", "local", "--transformer-impl"),
        ("--cuda-graph-impl local", "cuda_graph_impl", "none", "--cuda-graph-impl local"),
        ("--tp-comm-overlap", "tp_comm_overlap", False, "--tp-comm-overlap"),
        (
            "--cross-entropy-fusion-impl te",
            "cross_entropy_fusion_impl",
            "native",
            "--cross-entropy-fusion-impl",
        ),
        ("--optimizer-cpu-offload", "optimizer_cpu_offload", False, "--optimizer-cpu-offload"),
    ],
)
def test_what_only_computes_otherwise_stands_down_with_a_note(flags, dest, value, note):
    session = prepare(shlex.split(f"{MODEL} {flags}"), host="standalone", platform="cpu")
    assert getattr(session.args, dest) == value
    assert [each.flag for each in session.plan.flag_notes if each.flag.startswith(note)]


def test_an_optimizer_of_fewer_bits_does_not_stand_down():
    flags = "--use-precision-aware-optimizer --exp-avg-dtype bf16"
    session = prepare(shlex.split(f"{MODEL} {flags}"), host="standalone", platform="cpu")
    assert session.args.use_precision_aware_optimizer


def test_the_command_shows_each_flag_with_its_reason(capsys):
    from mindspeed_core.cli.features import main

    flags = shlex.split(f"{MODEL} --distributed-backend nccl --partial-rotary-factor 0.5")
    assert main(["plan", "--platform", "cpu", "--", *flags]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "flags that change nothing here --distributed-backend nccl the platform names" in shown
    assert "flags read as others --partial-rotary-factor 0.5 -> --rotary-percent 0.5" in shown
    assert main(["plan", "--json", "--platform", "cpu", "--", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["flag_notes"][0]["flag"] == "--distributed-backend nccl"


def test_a_wrong_line_says_everything_that_is_wrong_at_once():
    with pytest.raises(PlanError) as error:
        plan_for(shlex.split(f"{MODEL} --yaml-cfg x --spec a b --lr x"), host="standalone", platform="cpu")
    assert [problem.flag for problem in error.value.problems] == ["--yaml-cfg", "--spec", "--lr"]
