"""Command lines: every mistake at once, values with their origin, flags shared between owners."""

import json
import subprocess
import sys
import time
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.feature import Feature, Flag
from mindspeed_core.flags.flag_set import FlagSet, flag_set
from mindspeed_core.registry import Registry
from mindspeed_train.flag_help import help_text

HOST_FLAGS = (
    Flag("--hidden-size", type=int, help="100% of the width"),
    Flag("--lr", type=float, default=1e-3),
    Flag("--loss-scale", type=float, allow_nonfinite=True),
    Flag("--optimizer", type=str, default="adam", choices=("adam", "sgd")),
    Flag("--data-path", type=str, nargs="*", per_rank=True),
    Flag("--pair", type=int, nargs=2),
    Flag("--ranks", type=int, nargs="+", aliases=("--the-ranks",)),
    Flag("--bf16"),
    Flag("--no-position-embedding", inverts="add_position_embedding"),
    Flag("--window", type=int, default=0),
)


def host_flags():
    return HOST_FLAGS


HOST = HostDeclaration("demo", "a host", flags=f"{__name__}:host_flags", stages=())


def help_of(flags):
    return help_text(flags.entries, "mindspeed-train")


def feature(name, **attributes):
    values = {"name": name, "family": "demo", "summary": "shows", "flags": (Flag(f"--{name}"),), **attributes}
    return type(name.replace("-", "_"), (Feature,), values)


def flags_with(*features):
    return flag_set(Registry.of((HOST, *features), dist="demo-plugin", version="0.1"), "demo")


def parse(line, *features):
    return flags_with(*features).parse(line.split() if isinstance(line, str) else line)


def only(parsed):
    (problem,) = parsed.problems
    return problem


def test_values_have_their_flags_type():
    args = parse("--hidden-size 64 --lr 1e-4 --bf16 --ranks 1 2 3 --data-path a b").args
    assert (args.hidden_size, args.lr, args.bf16) == (64, 1e-4, True)
    assert (args.ranks, args.data_path) == ([1, 2, 3], ["a", "b"])


def test_a_value_may_follow_an_equals_sign():
    assert parse("--hidden-size=64 --data-path=--odd").args.data_path == ["--odd"]


def test_a_negative_number_is_a_value():
    args = parse("--lr -1e-5 --window -7").args
    assert (args.lr, args.window) == (-1e-5, -7)


def test_an_alias_is_the_same_flag():
    assert parse("--the-ranks 4").args.ranks == [4]


def test_a_switch_that_inverts_turns_its_attribute_off():
    assert parse("").args.add_position_embedding is True
    assert parse("--no-position-embedding").args.add_position_embedding is False


def test_the_last_of_two_values_wins():
    assert parse("--hidden-size 1 --hidden-size 2").args.hidden_size == 2


def test_every_value_knows_where_it_came_from():
    parsed = parse("--hidden-size 64 --the-ranks 1")
    assert parsed.provenance["hidden_size"] == "flag --hidden-size"
    assert parsed.provenance["ranks"] == "flag --the-ranks"
    assert parsed.provenance["lr"] == "default"


def test_list_defaults_are_not_shared_between_parses():
    flags = FlagSet()
    flags.add(Flag("--names", type=str, nargs="*", default=[]), "me", "mine")
    flags.parse([]).args.names.append("x")
    assert flags.parse([]).args.names == []


def test_an_abbreviation_is_not_accepted():
    problem = only(parse("--hidden 64"))
    assert (problem.code, problem.flag) == ("E-UNKNOWN-FLAG", "--hidden")
    assert "--hidden-size" in problem.remedy


def test_every_unknown_flag_is_reported_at_once_with_its_values_swallowed():
    problems = parse("--hiden-size 64 --zzz=1 --lrr 2 3").problems
    assert [p.flag for p in problems] == ["--hiden-size", "--zzz", "--lrr"]


def test_a_flag_of_an_announced_package_names_the_package():
    problem = only(parse("--context-parallel-algo ulysses_cp_algo"))
    assert problem.remedy == "pip install mindspeed-cp"


@pytest.mark.parametrize(
    ("option", "reason", "remedy"),
    [
        ("--use-batch-invariant-ops", "results that do not depend on the batch are not", "leave it out"),
        ("--use-flash-attn-npu-batch-invariant", "do not depend on the batch", "leave it out"),
        ("--use-fused-lightning-indexer", "its indexer and the loss of that are operators", "leave it out"),
        ("--use-fused-lightning-indexer-kl-loss", "sparse attention (DSA) is not here", "leave it out"),
        ("--enable-zero3", "over all data-parallel ranks", "--use-torch-fsdp2"),
    ],
)
def test_a_flag_of_mindspeed_is_answered_by_its_meaning(option, reason, remedy):
    problem = only(parse(option))
    assert problem.code == "E-UNKNOWN-FLAG"
    assert reason in problem.reason
    assert remedy in problem.remedy


def test_a_flag_that_the_installed_package_lacks_asks_for_an_upgrade():
    registry = Registry.of((HOST, feature("x")), dist="mindspeed-cp", version="0.0.1")
    problem = only(flag_set(registry, "demo").parse(["--cp-window-size", "2"]))
    assert problem.remedy == "pip install --upgrade mindspeed-cp"
    assert "0.0.1" in problem.reason


def test_a_flag_of_a_broken_package_says_that_it_is_broken():
    registry = Registry.of_distributions({"mindspeed-cp": ("0.3", 7), "host": ("1", (HOST,))})
    problem = only(flag_set(registry, "demo").parse(["--cp-window-size", "2"]))
    assert problem.code == "E-BROKEN-PLUGIN"
    assert "mindspeed-cp 0.3" in problem.reason


def test_a_flag_of_a_broken_feature_says_what_is_wrong_with_it():
    problem = only(parse("--rotten", feature("rotten", level=9)))
    assert problem.code == "E-BROKEN-PLUGIN"
    assert "level 9" in problem.reason


def test_an_installed_broken_feature_harms_nobody_who_does_not_ask_for_it():
    assert not parse("--good", feature("rotten", level=9), feature("good")).problems


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--hidden-size", "many"], "not a whole number"),
        (["--hidden-size", "9" * 5000], "64 bits"),
        (["--hidden-size", str(2**63)], "64 bits"),
        (["--hidden-size", ""], "not a whole number"),
        (["--hidden-size", "1.5"], "not a whole number"),
        (["--hidden-size", "🦆"], "not a whole number"),
        (["--hidden-size"], "takes one value, got none"),
        (["--lr", "nan"], "not a finite number"),
        (["--lr", "-inf"], "not a finite number"),
        (["--lr", "1e999"], "not a finite number"),
        (["--lr", "x" * 5000], "not a number"),
        (["--optimizer", "lion"], "not one of adam, sgd"),
        (["--pair", "1"], "takes 2 values, got 1"),
        (["--ranks"], "takes at least one value"),
        (["--bf16=1"], "takes no value"),
        (["--hidden-size", "1", "stray"], "belongs to no flag"),
        (["--data-path", "\udcff", "--lr", "\udcff"], "not a number"),
    ],
)
def test_a_bad_value_is_one_short_problem(line, words):
    problem = only(parse(line))
    assert problem.code == "E-FLAG-VALUE"
    assert words in problem.reason
    assert len(problem.reason) < 400
    str(problem).encode("utf-8")


@pytest.mark.parametrize("line", [["--\udcff"], ["--\udcff", "1"], ["--\x1b[31m", "stray"]])
def test_an_option_that_cannot_be_printed_is_escaped(line):
    for problem in parse(line).problems:
        assert str(problem).replace("\n", "").isprintable()


def test_a_flag_that_allows_it_takes_infinity():
    assert parse("--loss-scale inf").args.loss_scale == float("inf")


def test_two_bad_values_are_two_problems():
    assert len(parse("--hidden-size x --lr y").problems) == 2


def test_a_type_of_the_features_own_says_why_it_refuses():
    def even(text):
        if int(text) % 2:
            raise ArgumentTypeError(f"{text} is odd")
        return int(text)

    problem = only(parse("--x 3", feature("x", flags=(Flag("--x", type=even),))))
    assert "3 is odd" in problem.reason


def test_a_choice_of_an_announced_package_names_the_package():
    assert only(parse("--optimizer cadam")).remedy == "pip install mindspeed-optim, which adds it"


def test_a_misspelled_choice_gets_a_suggestion():
    assert "did you mean adam?" in only(parse("--optimizer adan")).remedy


def test_a_feature_extends_the_choices_of_a_host_flag():
    flags = flags_with(feature("lion", flags=(Flag("--optimizer", type=str, choices=("lion",)),)))
    assert flags.parse(["--optimizer", "lion"]).args.optimizer == "lion"
    assert flags.parse([]).args.optimizer == "adam"
    assert "lion: lion" in help_of(flags)


def test_the_help_of_an_adopted_flag_has_what_its_owner_and_the_features_say():
    def adopting(name, text, **options):
        return feature(name, flags=(Flag(f"--{name}"), Flag("--window", type=int, help=text, **options)))

    flags = flags_with(adopting("wide", "Wider.", default=8), adopting("a", "Any."), adopting("b", "Any."))
    shown = " ".join(help_of(flags).split())
    assert "(a, b: Any.)" in shown
    assert "(wide: Wider.; default 8)" in shown
    assert "(default: 0)" in shown


def test_a_features_other_default_holds_only_while_it_is_asked_for():
    window = feature("wide", flags=(Flag("--wide"), Flag("--window", type=int, default=8)))
    assert parse("", window).args.window == 0
    asked = parse("--wide", window)
    assert (asked.args.window, asked.provenance["window"]) == (8, "preset wide")
    assert parse("--wide --window 3", window).args.window == 3


def test_a_flag_with_another_meaning_is_a_clash_that_names_both_owners():
    text = feature("texty", flags=(Flag("--texty"), Flag("--hidden-size", type=str)))
    problem = only(parse("--texty", text))
    assert problem.code == "E-FLAG-CLASH"
    assert "host demo" in problem.reason
    assert "texty" in problem.reason
    assert not parse("--lr 1", text).problems


def test_a_preset_sets_what_nobody_gave():
    class Preset(feature("preset", flags=(Flag("--preset", type=str),))):
        @classmethod
        def presets(cls, args):
            return {"hidden_size": 4096, "lr": 3e-4} if args.preset == "big" else {}

    parsed = parse("--preset big --lr 1e-5", Preset)
    assert (parsed.args.hidden_size, parsed.args.lr) == (4096, 1e-5)
    assert parsed.provenance["hidden_size"] == "preset preset"
    assert parsed.provenance["lr"] == "flag --lr"


def test_two_presets_that_disagree_are_a_problem():
    def preset(name, value):
        def presets(cls, args):
            return {"hidden_size": value}

        return feature(name, presets=classmethod(presets))

    problem = only(parse("", preset("a", 1), preset("b", 2)))
    assert problem.code == "E-PRESET"
    assert "a presets hidden_size to 1" in problem.reason
    assert problem.remedy == "give --hidden-size yourself, for instance 1 or 2"


def test_a_preset_that_fails_is_a_problem_of_its_feature():
    def presets(cls, args):
        raise KeyError("oops")

    problem = only(parse("--a", feature("a", presets=classmethod(presets))))
    assert (problem.code, problem.feature) == ("E-PRESET", "a")


def test_a_preset_of_a_destination_nobody_defines_is_a_problem():
    def presets(cls, args):
        return {"hiden_size": 1}

    assert "hiden_size" in only(parse("--a", feature("a", presets=classmethod(presets)))).reason


def test_a_preset_above_the_optimization_level_does_not_apply():
    def presets(cls, args):
        return {"hidden_size": 1}

    wide = feature("a", presets=classmethod(presets), level=2)
    assert parse("--optimization-level 1", wide).args.hidden_size is None


@pytest.mark.parametrize("key", ["--hidden-size", "hidden-size", "hidden_size"])
def test_a_dictionary_takes_names_with_and_without_dashes(key):
    parsed = flags_with().parse_mapping({key: 64})
    assert (parsed.args.hidden_size, parsed.problems) == (64, ())
    assert parsed.provenance["hidden_size"] == "flag --hidden-size"


def test_a_dictionary_takes_values_and_their_text():
    args = flags_with().parse_mapping({"lr": "1e-4", "bf16": True, "ranks": [1, 2], "pair": "3 4"}).args
    assert (args.lr, args.bf16, args.ranks, args.pair) == (1e-4, True, [1, 2], [3, 4])


def test_text_for_several_values_is_split_as_a_shell_does():
    assert flags_with().parse_mapping({"data_path": "'a b' c"}).args.data_path == ["a b", "c"]
    assert only(flags_with().parse_mapping({"data_path": "it's"})).code == "E-FLAG-VALUE"


def test_a_dictionary_says_off_with_false_and_nothing_with_none():
    args = flags_with().parse_mapping({"bf16": False, "hidden-size": None}).args
    assert (args.bf16, args.hidden_size) == (False, None)


def test_a_dictionary_names_an_inverting_flag_or_its_destination():
    flags = flags_with()
    assert flags.parse_mapping({"no-position-embedding": True}).args.add_position_embedding is False
    assert flags.parse_mapping({"add_position_embedding": False}).args.add_position_embedding is False


def test_an_unknown_key_of_a_dictionary_is_a_problem():
    assert only(flags_with().parse_mapping({"hiden_size": 1})).flag == "--hiden-size"


@pytest.mark.parametrize("value", [True, 1.5, [1], {"a": 1}, object()])
def test_a_value_of_another_type_is_a_problem(value):
    assert only(flags_with().parse_mapping({"hidden_size": value})).code == "E-FLAG-VALUE"


def test_a_foreign_namespace_gives_what_is_ours_and_nothing_else():
    parsed = flags_with().parse_namespace(Namespace(hidden_size=64, lr=1e-3, params_dtype=object()))
    assert parsed.problems == ()
    assert parsed.args.hidden_size == 64
    assert not hasattr(parsed.args, "params_dtype")
    assert parsed.provenance["hidden_size"] == "flag --hidden-size"
    assert parsed.provenance["lr"] == "default"


def test_help_groups_features_by_package_and_family_and_tells_level_and_stability():
    text = help_of(flags_with(feature("ring", level=1, stability="prototype")))
    assert "demo-plugin 0.1: demo" in text
    assert "[level 1, prototype]" in text
    assert "100% of the width" in text


def test_asking_for_help_is_not_a_problem():
    parsed = parse("--help")
    assert parsed.wants_help
    assert not parsed.problems


def test_the_platforms_to_choose_from_are_those_installed():
    reason = only(parse("--platform tpu")).reason
    assert "'tpu': not one of auto, " in reason
    assert {"cpu", "cuda", "npu"} <= set(reason.partition("not one of ")[2].split(", "))


def test_the_values_that_may_differ_between_ranks_are_known():
    assert flags_with().per_rank() == {"data_path"}


def test_two_hundred_flags_are_built_and_parsed_in_thirty_milliseconds():
    features = [feature(f"f{i}", flags=(Flag(f"--f{i}"), Flag(f"--g{i}", type=int))) for i in range(100)]
    registry = Registry.of((HOST, *features))
    line = ["--f1", "--g5", "3", "--hidden-size", "64"]
    best = min(_timed(lambda: flag_set(registry, "demo").parse(line)) for _ in range(5))
    assert best < 0.03


def _timed(action):
    begin = time.process_time()
    action()
    return time.process_time() - begin


TOKEN = st.one_of(
    st.sampled_from(
        [o for f in HOST_FLAGS for o in f.options] + ["--bf16=1", "--", "-", "-h", "--ring", "--="]
    ),
    st.sampled_from(["1", "-1", "nan", "-inf", "", "x" * 5000, "🦆", str(10**400), "--=", "a=b", "% %s"]),
    st.text(max_size=12),
    st.builds("--{}".format, st.text(max_size=12)),
)


@settings(max_examples=1000, deadline=None)
@given(st.lists(TOKEN, max_size=10))
def test_no_command_line_raises(tokens):
    for problem in FUZZED.parse(tokens).problems:
        str(problem)


FUZZED = flags_with(feature("ring"))


def test_the_table_of_announced_flags_is_current_and_names_only_flags():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "tools" / "announced_flags.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    table = json.loads((root / "mindspeed_core" / "flags" / "announced.json").read_text())
    assert all(flag.startswith("--") for flags in table["flags"].values() for flag in flags)
    assert sum(map(len, table["flags"].values())) >= 150
