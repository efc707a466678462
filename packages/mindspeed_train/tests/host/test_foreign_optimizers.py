"""Inner optimizers of others resume bit for bit, under any layout, and exchange checkpoints with Adam."""

from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from test_checkpoint_resume import NO_DROPOUT, Messages, close_run, open_run, save, train

from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_core.registry import Registry
from mindspeed_testing.worlds import run_world
from mindspeed_toy_needs.features import UpdateRules

LLAMA = tuple(
    "--untie-embeddings-and-output-weights --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear".split()
)
SHARDED = ("--use-distributed-optimizer",)
BF16 = (*SHARDED, *LLAMA, "--bf16")
FSDP2 = ("--use-torch-fsdp2", *LLAMA)
FSDP = (*SHARDED, "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params", *LLAMA)
EXPERTS = tuple(
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --disable-bias-linear --swiglu "
    "--moe-token-dispatcher-type alltoall".split()
)
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")
ADAM = ("--optimizer", "adam")
EMPTY = "averaging, a rank without parameters"
COURSES = {
    "lion, whole": ("toy-lion", LLAMA, ((*LLAMA, *TP2), (*LLAMA, *PP2), (*LLAMA, *ADAM))),
    "sign, sharded": ("toy-sign", BF16, ((*BF16, *TP2), (*BF16, *PP2), (*BF16, *ADAM))),
    "int8, sharded": ("toy-int8", BF16, ((*BF16, *TP2), (*BF16, *PP2), (*BF16, *ADAM))),
    "averaging, whole": ("toy-averaged", LLAMA, ((*LLAMA, *TP2),)),
    "averaging, sharded": ("toy-averaged", BF16, ((*BF16, *TP2), (*BF16, *PP2))),
    "sign, torch's sharding, 16 bits": ("toy-sign", (*FSDP2, "--bf16"), ((*LLAMA, "--bf16"),)),
    "averaging, Megatron-FSDP": ("toy-averaged", FSDP, ((*SHARDED, *LLAMA), (*FSDP, *TP2))),
    EMPTY: (
        "toy-averaged",
        (*SHARDED, "--only-train", "final_layernorm.weight"),
        (),
    ),
    "sign, a frozen stage": ("toy-sign", (*SHARDED, *PP2, "--only-train", "final_layernorm.weight"), ()),
    "lion, 16 bits, whole": ("toy-lion", (*LLAMA, "--bf16"), ((*LLAMA, "--bf16", *TP2),)),
    "int8, whole": ("toy-int8", LLAMA, ((*LLAMA, *TP2),)),
    "int8, experts": ("toy-int8", (*SHARDED, *EXPERTS, *EP2), ((*SHARDED, *EXPERTS),)),
    "lion, beside training": ("toy-lion", (*SHARDED, "--async-save"), ()),
    "int8, float16": ("toy-int8", (*SHARDED, "--fp16", "--loss-scale", "64"), ()),
    "int8, torch's sharding": ("toy-int8", FSDP2, (LLAMA, (*FSDP2, *ADAM))),
}
THOROUGH = tuple(COURSES)[9:]
if not Version("0.16") <= Version(version("megatron-core")) < Version("0.18"):
    # Its parts are described as 0.16 cuts them, and its corrections are those up to 0.17.
    del COURSES["averaging, Megatron-FSDP"]
ALONE = ("lion, whole", "sign, sharded", "int8, sharded")
"""Courses whose checkpoints one process loads too."""


class OnlyTrain(Feature):
    """Freezes all other parameters."""

    name = "only-train"
    family = "tests"
    summary = "For tests."
    flags = (Flag("--only-train", type=str, help="End of the names of parameters that are trained."),)

    @hookimpl(wrapper=True)
    def build_model(self, args):
        model = yield
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad = name.endswith(args.only_train)
        return model


REGISTRY = Registry.of([UpdateRules, OnlyTrain])


def opened(kind, flags):
    return open_run([*NO_DROPOUT, "--optimizer", kind, *flags], registry=REGISTRY)


def tensors(folder):
    """The tensors of model and optimizer in the latest checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp

    from mindspeed_train.checkpoint import publish

    reader = dcp.FileSystemReader(str(publish.find(Path(folder), None).path))
    held = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in held.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def rewrite(kind, flags, source, target):
    """Load a checkpoint and save it without a step in between; return what was said."""
    messages = Messages()
    run = opened(kind, [*flags, "--load", source, "--save", target])
    if "--optimizer" not in flags and kind != "adam":
        assert {group["step"] for group in run.optimizer.param_groups} == {2}
    save(run)
    close_run(run)
    return messages.end()


def kind_of(key):
    return key.split(".")[2] if key.startswith("optimizer.state.") else "weights"


def compared(one, other, tolerance=0.0):
    """Return the kinds of tensors that differ, and those of one side alone; the model's are "weights"."""

    def apart(key):
        largest = one[key].float().abs().max()
        return float((one[key].float() - other[key].float()).abs().max()) > tolerance * float(largest)

    differing = {kind_of(key) for key in one.keys() & other.keys() if apart(key)}
    return sorted(differing), sorted({kind_of(key) for key in one.keys() ^ other.keys()})


def courses(folder, names):
    """For each course: a run that goes on, one that resumes, and its state as others save it again."""
    from mindspeed_train.checkpoint.save import Saver

    found = {}
    for name in names:
        kind, flags, others = COURSES[name]
        root, tolerance = f"{folder}/{name}", 0.05 if kind == "toy-int8" else 0.0
        run = opened(kind, [*flags, "--save", f"{root}/first"])
        train(run, 2)
        save(run)
        held = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
        went_on = train(run, 2)
        run.session.state(Saver).poll(blocking=True)
        close_run(run)
        run = opened(kind, [*flags, "--load", f"{root}/first"])
        resumed = train(run, 2)
        close_run(run)
        first, compare = tensors(f"{root}/first"), []
        for index, other in enumerate(others):
            rewrite(kind, other, f"{root}/first", f"{root}/{index}")
            compare.append(compared(first, tensors(f"{root}/{index}"), tolerance))
        kinds = {kind_of(key) for key, tensor in first.items() if tensor.any()}
        found[name] = went_on, resumed, compare, len(held), kinds
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("courses"))


@pytest.fixture(scope="module")
def trained(folder, asked_for):
    names = [name for name in COURSES if name in {*ALONE, *asked_for("course")}]
    return run_world(courses, 2, folder, names, timeout=400)


def marked(names):
    return [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in names]


@pytest.mark.parametrize("course", marked(COURSES))
def test_a_rule_of_ones_own_resumes_bit_for_bit(trained, course):
    for went_on, resumed, *_ in (rank[course] for rank in trained):
        assert resumed == went_on
        assert went_on[0] != went_on[1]


@pytest.mark.parametrize("course", marked(COURSES))
def test_a_checkpoint_holds_all_that_a_rule_keeps(trained, course):
    kept = {
        "toy-lion": {"exp_avg"},
        "toy-sign": {"exp_avg"},
        "toy-int8": {"exp_avg", "exp_avg_sq"},
        "toy-averaged": {"exp_avg", "average", "sum", "last", "largest"},
    }[COURSES[course][0]]
    assert trained[0][course][4] - {"param", "fp32_param", "weights"} == kept


def test_a_rank_may_hold_no_parameter(trained):
    assert sorted(rank[EMPTY][3] for rank in trained) == [0, 1]


@pytest.mark.parametrize("course", marked(name for name, (*_, others) in COURSES.items() if others))
def test_other_layouts_and_adam_take_its_state_over(trained, course):
    found = trained[0][course][2]
    assert len(found) == len(COURSES[course][2])
    assert found == [([], [])] * len(found)


def rewrite_alone(folder):
    """The state of two ranks, as one process loads it and saves it again."""
    found = {}
    for name in ALONE:
        kind, flags, _ = COURSES[name]
        root, tolerance = f"{folder}/{name}", 0.05 if kind == "toy-int8" else 0.0
        rewrite(kind, flags, f"{root}/first", f"{root}/alone")
        found[name] = compared(tensors(f"{root}/first"), tensors(f"{root}/alone"), tolerance)
    return found


@pytest.mark.usefixtures("trained")
def test_one_process_takes_the_state_of_two_over(folder):
    assert run_world(rewrite_alone, 1, folder, timeout=200)[0] == dict.fromkeys(ALONE, ([], []))


def exchange_with_adam(folder):
    """Adam's checkpoint in rules of others, and back again."""
    found = {}
    for form, flags in {"whole": LLAMA, "sharded": (*SHARDED, *LLAMA)}.items():
        adam = f"{folder}/{form}"
        run = opened("adam", [*flags, "--save", adam])
        train(run, 2)
        save(run)
        close_run(run)
        rewrite("toy-averaged", flags, adam, f"{adam}-averaging")
        taken = tensors(f"{adam}-averaging")
        prefix = "optimizer.state.average."
        averages = {key.removeprefix(prefix): value for key, value in taken.items() if key.startswith(prefix)}
        fresh = [bool((taken[key] == average).all()) for key, average in averages.items()]
        said = rewrite("adam", flags, f"{adam}-averaging", f"{adam}-again")
        quiet = rewrite("adam", flags, adam, f"{adam}-adam")
        again = compared(tensors(adam), tensors(f"{adam}-again"))
        found[form] = compared(tensors(adam), taken), fresh, again, said, quiet
    return found


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    return run_world(exchange_with_adam, 1, str(tmp_path_factory.mktemp("adam")), timeout=200)[0]


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_adams_moments_go_into_a_rule_of_ones_own(exchanged, form):
    (differing, only), fresh, *_ = exchanged[form]
    assert differing == ["exp_avg_sq"]
    assert only == ["average", "largest", "last", "sum"]
    # What Adam does not keep starts as in a new state, from the weights that were loaded.
    assert len(fresh) == 9
    assert all(fresh)


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_a_moment_that_was_not_kept_is_named_when_adam_needs_it(exchanged, form):
    *_, (differing, only), said, quiet = exchanged[form]
    assert (differing, only) == (["exp_avg_sq"], [])
    text = "kept no exp_avg_sq: after 2 updates AdamW starts it from zeros"
    assert [text in message for message in said].count(True) == 1
    assert not any(text in message for message in quiet)
