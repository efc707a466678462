"""Every training flag of Megatron-LM has an answer: it is here, or a rule says why not."""

import re
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

from mindspeed_core.activation import prepare
from mindspeed_core.feature import Flag
from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry
from mindspeed_megatron.config_fields import config_fields
from mindspeed_megatron.config_flags import dest_of
from mindspeed_megatron.upstream.megatron_lm_flags import megatron_lm_flags
from mindspeed_megatron.upstream.table import VERDICTS
from mindspeed_megatron.upstream.verdicts import MEGATRON_LM, NOTED, REFUSED, TRANSLATED, USED
from mindspeed_train.arguments.megatron_lm_answers import answers
from mindspeed_train.arguments.refusals import REFUSALS
from mindspeed_train.flags import host_flags

PARTS = ("mindspeed_train", "mindspeed_megatron")
DECLARATIONS = tuple(
    "flags arguments/megatron_lm_answers arguments/refusals fault_tolerance/flags monitoring/flags "
    "megatron_lm_flags config_flags fully_sharded/flags hosts/ migrate doctor/ launch/".split()
)
# What of megatron-core no training of this host reaches.
ELSEWHERE = tuple(
    "extensions inference export post_training resharding ssm models/mamba models/T5 models/bert "
    "models/vision models/multimodal models/retro models/gpt/exp transformer/exp fp8_utils fp4_utils "
    "full_cuda_graph transformer/cuda_graphs optimizer/muon".split()
)


@lru_cache(maxsize=1)
def found():
    entries = flag_set(Registry.discover(), "standalone").entries
    return {answer.option: answer for answer in answers({o: e.flag for e in entries for o in e.flag.options})}


def test_nobody_has_to_guess_about_any_flag():
    assert len(found()) == len(megatron_lm_flags()[1]) > 600
    assert all(answer.reason for answer in found().values() if answer.status != USED)


@pytest.mark.parametrize(
    ("option", "status"),
    [
        ("--hidden-size", USED),
        ("--timing-log-level", USED),
        ("--yaml-cfg", REFUSED),
        ("--fake-process-group", USED),
        ("--log-params-norm", USED),
        ("--enable-experimental", NOTED),
        ("--moe-router-fusion", USED),
        ("--no-position-embedding", TRANSLATED),
        ("--rl-use-sequence-packing", REFUSED),
    ],
)
def test_a_flag_has_the_status_of_what_the_host_does(option, status):
    assert found()[option].status == status


def test_a_flag_that_is_refused_whatever_its_value_is_not_called_supported():
    answer = found()["--hybrid-override-pattern"]
    assert answer.status == REFUSED
    assert "mamba_ssm" in answer.reason


def test_what_is_called_supported_is_read_by_somebody():
    """By the host, by a plugin, or by what of megatron-core runs without TransformerEngine."""
    read = set[str]()
    for part in PARTS:
        read |= names_read(Path(import_module(part).__file__).parent, DECLARATIONS, r"args\.(\w+)|\"(\w+)\"")
    read |= names_read(megatron_core(), ELSEWHERE, r"\.(\w+)|getattr\(\w+, ['\"](\w+)")
    fields = {dest_of(field.name): field.name for field in config_fields()}
    accounted = {refusal.dest for refusal in REFUSALS} | {fields.get(r.dest, r.dest) for r in REFUSALS}
    idle = []
    for option, answer in found().items():
        flag = host_flag(option)
        if answer.status != USED or flag is None or answer.reason.endswith(("always so here", "alone")):
            continue
        if not {flag.dest, fields.get(flag.dest, flag.dest)} & (read | accounted):
            idle.append(option)
    assert idle == []


def megatron_core():
    return next(Path(place) / "core" for place in find_spec("megatron").submodule_search_locations)


def names_read(root, left_out, pattern):
    """The names that the pattern finds in the modules below a folder."""
    names = set()
    for path in root.rglob("*.py"):
        if not path.relative_to(root).as_posix().startswith(left_out):
            names.update(filter(None, chain(*re.findall(pattern, path.read_text(encoding="utf-8")))))
    return names


@lru_cache(maxsize=1)
def host_options():
    return {option: flag for flag in host_flags() for option in flag.options}


def host_flag(option):
    return host_options().get(option)


def test_a_value_that_is_refused_is_noted():
    answer = found()["--moe-token-dispatcher-type"]
    assert answer.status == USED
    assert "flex changes nothing without the package deep_ep" in answer.reason


def test_another_default_is_noted():
    assert found()["--log-interval"].reason == "default 1, in Megatron-LM 100"


def test_every_pattern_of_a_verdict_names_a_flag():
    options = [option for facts in megatron_lm_flags()[1] for option in facts["options"]]
    patterns = [p for verdict in VERDICTS if verdict.source == MEGATRON_LM for p in verdict.options]
    assert [p for p in patterns if not any(fnmatchcase(option, p) for option in options)] == []


def test_a_flag_without_answer_is_an_error():
    with pytest.raises(LookupError, match="--tensor-model-parallel-size"):
        list(answers({"--other": Flag("--other", help="x")}))


def test_the_command_line_says_why_a_flag_is_not_here():
    flags = flag_set(Registry.discover(), "standalone")
    (problem,) = flags.parse(["--yaml-cfg"]).problems
    assert "mindspeed-features migrate" in str(problem)
    (unknown,) = flags.parse(["--no-such-thing"]).problems
    assert "no such flag" in str(unknown)


def test_the_table_needs_no_torch():
    code = "import sys, mindspeed_megatron.upstream.megatron_lm_flags as m; m.megatron_lm_flags()"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    ("flag", "argument", "value"),
    [
        ("--no-create-attention-mask-in-dataloader", "create_attention_mask_in_dataloader", False),
        ("--create-attention-mask-in-dataloader", "create_attention_mask_in_dataloader", True),
        ("--multi-head-latent-attention", "multi_latent_attention", True),
    ],
)
def test_other_spellings_of_scripts_mean_the_same_argument(flag, argument, value):
    assert getattr(prepare([flag], host="standalone", platform="cpu").args, argument) is value
