"""``show`` prints everything a feature declares, and helps with slips."""

from __future__ import annotations

from made_packages import feature_source

BODY = """
requires = (
    Requirement(feature="thing-b", reason="needs its buffers", implies=True),
    Requirement(any_of=("thing-b", "thing-c"), reason="needs one of them"),
    Requirement(flag="--micro-batch-size", one_of=(1, 2), reason="larger ones do not fit"),
)
conflicts = (Conflict(flag="--fp16", reason="overflows"),)
after = ("thing-b",)
slots = ("norm",)
packages = ("torch_npu>=2.6; platform == 'npu'",)
platforms = ("cpu",)
fallback = Fallback("has no kernel there", feature="thing-b")
modes = ("train",)
mode_fallback = Fallback("needs whole sequences", feature="thing-b")
checkpoint_as = "thing-b"
patches = (Patch("torch:nowhere", "pack_a.x:y", "has no other way", versions="torch>=2.6"),)
verify = (
    Scenario("halves", flags=("--thing-a",), world_size=2, tolerance=0.0, gains=(Gain("peak_bytes", 0.5),)),
    Scenario("alike", ("--thing-a", "--x"), ("--thing-a",), same_feature=True, compare=("losses",)),
    Scenario("resume", ("--thing-a",), resume=Resume(("--thing-a", "--bf16"), world_size=2)),
)
docs = "pack_a:page.md"
deterministic = True
formulas = {"bytes_sent": "4 * s * h"}
tuning = {"--thing-a": (0, 1)}

@hookimpl(wrapper=True)
def train_step(self):
    return (yield)
"""


def test_everything_that_is_declared_is_shown(features, install):
    site = install("pack-a", feature_source("thing-a", BODY))
    (site / "pack_a" / "page.md").write_text("# A page\nHow it works.\n")
    install(
        "pack-b",
        feature_source("thing-b") + 'ThingB.conflicts = (Conflict(feature="thing-a", reason="old"),)',
    )

    output = features("show", "thing-a", "--all", "--platform", "cpu").output

    expected = (
        "thing-a  pack-a 0.1.0\nA feature for tests\n",
        "here      ok (platform cpu)",
        "level     2 (on with --optimization-level 2 or more)",
        "family    samples",
        "--thing-a  switch",
        "wraps train_step",
        "norm: the normalization modules",
        "thing-b (switched on with it): needs its buffers",
        "thing-b or thing-c: needs one of them",
        "--micro-batch-size 1 or 2: larger ones do not fit",
        "--fp16: overflows",
        "thing-b: old",
        "torch_npu>=2.6; platform == 'npu'",
        "on other platforms thing-b takes over: has no kernel there",
        "in other modes thing-b takes over: needs whole sequences",
        "checkpoints are those of thing-b; each reads the other's",
        "replace torch:nowhere (torch>=2.6): has no other way",
        "proofs    3 proofs on 1 to 2 ranks, 1 bit for bit, the others within 1e-05",
        "deterministic: yes",
        "bytes_sent = 4 * s * h",
        "--thing-a: 0, 1",
    )
    assert [text for text in expected if text not in output] == []
    assert features("show", "thing-a", "--page").output == "# A page\nHow it works.\n"


def test_every_proof_is_shown_on_request(features, install):
    install("pack-a", feature_source("thing-a", BODY))

    output = features("show", "thing-a", "--proofs").output

    expected = (
        "thing-a: 3 proofs on 1 to 2 ranks, 1 bit for bit, the others within 1e-05",
        "halves\n  2 ranks, 3 steps, equal bit for bit; peak_bytes at most 0.5 x",
        "with     --thing-a",
        "without  (the plain model)",
        "alike\n  1 rank, 3 steps, equal within 1e-05 in losses",
        "and      --thing-a",
        "resume\n  1 rank, 3 steps, a checkpoint, 2 steps; resumed equal bit for bit, on 2 in the other "
        "layout within 1e-05",
        "saved    --thing-a",
        "resumed  --thing-a --bf16",
    )
    assert [text for text in expected if text not in output] == []


def test_a_feature_without_proofs_says_so(features, install):
    install("pack-b", feature_source("thing-b"))

    result = features("show", "thing-b", "--proofs")

    assert result.exit_code == 1
    assert "the feature thing-b declares no proofs" in result.output


def test_the_first_screen_says_what_users_need_and_how_to_see_the_rest(features, install):
    install("pack-a", feature_source("thing-a", BODY))
    install("pack-b", feature_source("thing-b"))

    output = features("show", "thing-a").output

    shown = (
        "A feature for tests",
        "  --thing-a  Switch it on.",
        "--fp16: overflows",
        "show thing-a --all",
        "3 proofs",
    )
    assert [text for text in shown if text not in output] == []
    assert [text for text in ("bytes_sent", "wraps train_step", "halves") if text in output] == []
    assert len(output.splitlines()) < 50


def test_a_missing_page_is_said(features, install):
    install("pack-a", feature_source("thing-a", BODY))

    result = features("show", "thing-a", "--page")

    assert result.exit_code == 1
    assert "pack_a:page.md is not in the installed package" in result.output


def test_a_misspelled_name_gets_a_suggestion(features, install):
    install("pack-a", feature_source("thing-a"))

    result = features("show", "thing-e")

    assert result.exit_code == 2
    assert "did you mean thing-a" in result.output


def test_a_flag_leads_to_its_feature(features, install):
    install("pack-a", feature_source("thing-a"))

    assert features("show", "--", "--thing-a").output.startswith("thing-a  ")


def test_a_broken_feature_says_what_is_wrong_with_it(features, install):
    install("pack-a", feature_source("thing-a", 'slots = ("nrom",)'))

    result = features("show", "thing-a")

    assert result.exit_code == 1
    assert "'nrom'" in result.output
    assert "did you mean 'norm'" in result.output


ADOPTING = """
before = ("other",)
replaces_roles = ("final_layernorm",)
flags = (
    Flag("--thing-b", help="Ask for it."),
    Flag("--optimizer", type=str, choices=("lion",), help="Signs of the momentum."),
    Flag("--seed", type=int, default=4, help="A good one."),
)
"""


def test_an_adopted_flag_shows_what_its_owner_says_and_what_the_feature_adds(features, install):
    install("pack-b", feature_source("thing-b", ADOPTING))

    lines = iter(features("show", "thing-b", "--all").output.splitlines())
    optimizer = next(line for line in lines if line.startswith("  --optimizer "))
    meaning = next(lines)
    seed = next(line for line in lines if line.startswith("  --seed "))

    assert "adam" in optimizer
    assert "lion" in optimizer
    assert "(host standalone) Signs of the momentum." in meaning
    assert "1234; 4 with thing-b" in seed


def test_what_it_comes_before_and_which_modules_it_replaces_is_shown(features, install):
    install("pack-b", feature_source("thing-b", ADOPTING))

    output = features("show", "thing-b", "--all").output

    assert "comes before\n  other" in output
    assert "replaces modules with the roles\n  final_layernorm" in output
