"""Sheets: every layout of every model plans, and what is wrong in one is said with file and key."""

import pytest

from mindspeed_core.errors import UserError
from mindspeed_core.registry import Registry
from mindspeed_core.validation import check
from mindspeed_models.evaluation.command import evaluate_command
from mindspeed_models.inference.generate_command import command as generate_command
from mindspeed_models.running.config import write_config
from mindspeed_models.running.sheets import find_sheet, read_sheet, sheet_names, words_of
from mindspeed_models.running.steps import STEPS, Asked

INSTALLED = Registry.discover()
SEEDS = {
    "aquila": ("7b",),
    "baichuan": ("7b", "13b"),
    "baichuan2": ("7b", "13b"),
    "bloom": ("7b1", "176b"),
    "internlm": ("7b", "65b"),
    "llama": ("7b", "13b", "33b", "65b"),
    "llama2": ("7b", "13b", "34b", "70b"),
}
NAMES = [f"{family}-{size}" for family, sizes in SEEDS.items() for size in (*sizes, "tiny")]
OFTEN = ("llama2-70b", "bloom-176b", "baichuan-13b", "llama-tiny")
"""Sheets that the suite plans: rotary and alibi, uneven stages, stages alone."""
CASES = [
    pytest.param(
        name, devices, step, marks=() if name in OFTEN and step == "pretrain" else pytest.mark.thorough
    )
    for name in NAMES
    for devices in find_sheet(name).devices
    for step in ("pretrain", "finetune", "lora")
    if step == "lora" or devices >= find_sheet(name).train_from
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


def command(folder, name, devices, step):
    sheet = find_sheet(name)
    work = folder / name
    write_config(sheet.model, work / "model", sheet.vocab_size)
    asked = Asked(sheet=sheet, work=work, nproc=min(devices, 8), devices=devices)
    return list(STEPS[step].commands(asked)[-1].words)


ASKING = [
    pytest.param(name, devices, step, marks=() if name == "bloom-176b" else pytest.mark.thorough)
    for name in NAMES
    for devices in find_sheet(name).devices
    for step in ("generate", "evaluate")
]


def without_files(words):
    """The words with a tokenizer that needs no file."""
    at = words.index("--tokenizer-type")
    return [*words[:at], "--tokenizer-type", "NullTokenizer", *words[at + 4 :]]


def test_every_family_and_size_of_the_seed_has_a_sheet():
    assert sheet_names() == sorted(NAMES)
    assert all({8, 16, 32, 64} <= set(find_sheet(name).devices) for name in NAMES if "tiny" not in name)


@pytest.mark.parametrize(("name", "devices", "step"), CASES)
def test_every_layout_plans(folder, name, devices, step):
    words = without_files(command(folder, name, devices, step))
    checked = check(words, world_size=devices, platform="fake", registry=INSTALLED)
    assert checked.ok, [str(problem) for problem in checked.problems]
    assert checked.unread == ()


@pytest.mark.parametrize(("name", "devices", "step"), ASKING)
def test_every_layout_plans_what_asks_the_trained_model(folder, name, devices, step):
    """Flags that the command has itself are taken away; the host plans the others."""
    sheet, work = find_sheet(name), folder / name
    write_config(sheet.model, work / "model", sheet.vocab_size)
    asked = Asked(
        sheet=sheet,
        work=work,
        nproc=min(devices, 8),
        devices=devices,
        prompts=work / "prompts.txt",
        tasks=("boolq=data",),
    )
    program = {"generate": generate_command, "evaluate": evaluate_command}[step]
    given = program.make_context(step, list(STEPS[step].commands(asked)[-1].words[1:])).params
    sizes = {name: given[name] for name in ("tp", "pp", "ep")}
    assert devices % (sizes["tp"] * sizes["pp"]) == 0
    flags = [word for word in given["flags"] if word != "--tokenizer-model"]
    flags.remove(str(asked.tokenizer_file))
    words = [
        *("--tensor-model-parallel-size", str(sizes["tp"])),
        *("--pipeline-model-parallel-size", str(sizes["pp"])),
        *("--tokenizer-type", "NullTokenizer", *flags),
    ]
    checked = check(words, world_size=devices, platform="fake", mode="inference", registry=INSTALLED)
    assert checked.ok, [str(problem) for problem in checked.problems]
    assert checked.unread == ()


def test_layouts_are_the_seeds():
    def sizes(name, devices, step="pretrain"):
        flags = find_sheet(name).training(step, devices)
        return tuple(flags.get(f"{each}-model-parallel-size", 1) for each in ("tensor", "pipeline"))

    assert sizes("llama-13b", 8) == (1, 8)
    assert sizes("llama-13b", 16) == (1, 2)
    assert sizes("llama-13b", 8, "lora") == (4, 2)
    assert sizes("llama-33b", 16) == (4, 4)
    assert sizes("llama-65b", 32) == sizes("internlm-65b", 32) == (8, 4)
    assert sizes("llama2-13b", 8) == sizes("baichuan-13b", 8) == sizes("baichuan2-13b", 16) == (8, 1)
    assert sizes("llama2-34b", 16) == (8, 2)
    assert sizes("llama2-70b", 64) == (8, 8)
    assert sizes("bloom-176b", 96) == (8, 12)


def test_schedules_are_the_seeds():
    def flag(name, devices, *flags):
        found = find_sheet(name).training("pretrain", devices)
        return tuple(found.get(each) for each in flags)

    batches = ("micro-batch-size", "global-batch-size")
    assert flag("llama2-70b", 64, *batches) == (2, 1024)
    assert flag("baichuan2-13b", 16, *batches) == (2, 256)
    assert flag("bloom-176b", 96, "global-batch-size", "rampup-batch-size") == (2048, [192, 16, 9765625])
    ends = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
    assert flag("bloom-176b", 96, *ends) == (5, 5)


def test_a_model_is_named_in_several_ways():
    names = (("llama2-13b", None), ("LLaMA2", "13b"), ("llama-2-13b", None))
    assert {find_sheet(*each).model for each in names} == {"llama2-13b"}
    assert find_sheet("tiny-llama2").model == "llama2-tiny"


def test_words_are_those_of_a_command_line():
    assert words_of({"bf16": True, "lr": 1e-4, "lora-target-modules": ["dense", "proj"]}) == [
        *("--bf16", "--lr", "0.0001", "--lora-target-modules", "dense", "proj")
    ]


def test_kernels_can_be_left_out():
    sheet = find_sheet("llama2-7b")
    assert "use-flash-attn" in sheet.training("pretrain", 8)
    assert "use-flash-attn" not in sheet.training("pretrain", 8, kernels=False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("model =", "is no TOML"),
        ("[layouts.8]\n", "has no model"),
        ('model = "llama2-7b"\n', "has no layouts by number of devices"),
        ('model = "llama2-7b"\n[layouts.many]\n', "has no layouts by number of devices"),
        ('model = "llama2-7b"\nlayout = 1\n[layouts.8]\n', "layout is no key of a sheet"),
        ('model = "llama2-7b"\nflags = 1\n[layouts.8]\n', "flags is no table"),
        ('model = "llama2-7b"\nlike = "mine"\n[layouts.8]\n', "like is 'mine'"),
        ('model = "llama2-7b"\nvocab-size = -1\n[layouts.8]\n', "vocab-size is -1"),
    ],
)
def test_a_wrong_sheet_is_one_sentence(tmp_path, content, said):
    file = tmp_path / "own.toml"
    file.write_text(content)
    with pytest.raises(UserError, match=said) as caught:
        read_sheet(file, str(file))
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama2", "say which size with --size; there are sheets for llama2-13b"),
        ("lama2-13b", "llama2-13b"),
        ("llama3-8b", "there is no sheet for llama3-8b"),
        ("absent.toml", "absent.toml"),
    ],
)
def test_a_model_without_a_sheet_is_one_sentence(name, said):
    with pytest.raises(UserError, match=said):
        find_sheet(name)


def test_devices_without_a_layout_and_too_few_of_them_are_refused():
    sheet = find_sheet("llama2-70b")
    with pytest.raises(UserError, match="has layouts for 8, 16, 32, 64"):
        sheet.training("pretrain", 12)
    with pytest.raises(UserError, match="need at least 32 devices"):
        sheet.training("finetune", 8)
    assert sheet.training("lora", 8)["tensor-model-parallel-size"] == 8


def test_a_config_is_written_once(tmp_path):
    assert "llama2" in write_config("llama2-tiny", tmp_path, 320)
    assert "is there already" in write_config("llama2-tiny", tmp_path, 320)
    with pytest.raises(UserError, match="holds another model"):
        write_config("llama2-tiny", tmp_path, 400)
    with pytest.raises(UserError, match="say which size; there are llama2-tiny"):
        write_config("llama2", tmp_path / "other")
