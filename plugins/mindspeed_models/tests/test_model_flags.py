"""A model by its name: flags with where they come from, and contradictions refused with both values."""

import json

import pytest

from mindspeed_core.activation import plan_for
from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.validation import check
from mindspeed_testing.small_llama import write_small_llama

INSTALLED = Registry.discover()
TRAIN = ("--micro-batch-size", "1", "--seq-length", "16", "--train-iters", "1", "--lr", "1e-3", "--mock-data")


def plan(*flags, host="standalone"):
    return plan_for(list(flags), platform="cpu", host=host, registry=INSTALLED)[1]


def problems(*flags):
    try:
        return "\n".join(map(str, check([*TRAIN, *flags], world_size=1, registry=INSTALLED).problems))
    except (PlanError, UserError) as error:
        return str(error)


@pytest.fixture
def folder(tmp_path):
    return str(write_small_llama(tmp_path / "hf"))


def test_a_name_sets_the_flags_of_the_model():
    parsed = plan(*TRAIN, "--model", "llama3-8b")
    args = parsed.args
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size, args.num_query_groups) == (
        32,
        4096,
        14336,
        8,
    )
    assert (args.rotary_base, args.vocab_size, args.swiglu, args.add_bias_linear) == (
        500000,
        128256,
        True,
        False,
    )
    assert parsed.provenance["num_layers"] == "preset model-recipes"


def test_a_plan_for_a_script_of_megatron_lm_takes_a_folder(folder):
    args = plan("--model-config", folder, "--transformer-impl", "local", host="megatron-lm").args
    assert args.model_config == folder


def test_a_library_session_says_that_its_program_loads(folder):
    with pytest.raises(PlanError, match="library leaves to your program"):
        plan("--model-config", folder, host="library")


@pytest.mark.parametrize("flag", ["--load", "--pretrained-checkpoint"])
def test_a_folder_that_is_loaded_describes_the_model(folder, flag):
    args = plan(*TRAIN, flag, folder).args
    assert (args.num_layers, args.hidden_size) == (4, 32)


def test_defaults_of_training_are_changed_by_flags(folder):
    args = plan(*TRAIN, "--model-config", folder, "--hidden-dropout", "0.2").args
    assert (args.hidden_dropout, args.attention_dropout) == (0.2, 0.0)


def test_a_flag_that_contradicts_is_refused_with_both_values(folder):
    text = problems("--model-config", folder, "--num-layers", "5", "--norm-epsilon", "1e-3")
    assert "--num-layers is 5, the model has 4" in text
    assert "--norm-epsilon is 0.001, the model has 1e-05" in text
    assert "--override-model-config" in text
    assert "contra" not in problems("--model-config", folder, "--num-layers", "5", "--override-model-config")
    assert (
        plan(*TRAIN, "--model-config", folder, "--num-layers", "5", "--override-model-config").args.num_layers
        == 5
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "lama3-8b"), "did you mean 'llama3-8b'"),
        (("--model", "llama3"), "names a family and no size"),
        (("--model", "gemma2-9b"), "not supported"),
        (("--model-config", "nowhere"), "--model-config nowhere"),
        (("--model", "llama-tiny", "--added-token-num", "-1"), "--added-token-num -1"),
        (("--model", "llama-tiny", "--no-add-gate"), "--swiglu has a gate"),
        (("--model", "llama-tiny", "--pad-vocab-size-to", "100"), "less than the vocabulary of 256"),
        (
            ("--model", "llama-tiny", "--pad-vocab-size-to", "512", "--padded-vocab-size", "300"),
            "another flag",
        ),
        (("--model", "gemma-tiny", "--swiglu"), "--swiglu"),
    ],
)
def test_bad_input_is_one_sentence(flags, said):
    assert said in problems(*flags)


@pytest.mark.parametrize(
    ("change", "parts", "said"),
    [({}, 3, ["heads", "8", "3"]), ({"intermediate_size": 50}, 4, ["50", "4"])],
    ids=["heads", "rows of the MLP"],
)
def test_ranks_that_cannot_share_a_model_are_refused_before_it_is_built(tmp_path, change, parts, said):
    folder = write_small_llama(tmp_path / "hf")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    flags = [*TRAIN, "--model-config", str(folder), "--tensor-model-parallel-size", str(parts)]
    text = "\n".join(map(str, check(flags, world_size=parts, registry=INSTALLED).problems))
    assert "--tensor-model-parallel-size" in text
    assert all(each in text for each in said)


def test_the_vocabulary_is_padded_to_a_size(folder):
    args = plan(*TRAIN, "--model-config", folder, "--pad-vocab-size-to", "512").args
    assert args.asked_padded_vocab_size == 512


def test_added_tokens_enlarge_the_vocabulary(folder):
    assert plan(*TRAIN, "--model-config", folder, "--added-token-num", "6").args.vocab_size == 256


def test_families_are_named_in_the_help():
    record = INSTALLED.features["model-recipes"]
    text = next(flag.help for flag in record.cls.flags if flag.name == "--model")
    assert all(name in text for name in ("llama3", "deepseek-v3", "baichuan2", "gemma"))
    assert "gemma2" not in text
