"""Inner optimizers of others: they resume bit for bit, under any layout, and exchange checkpoints with Adam."""

import pytest
from foreign_optimizers import REGISTRY
from test_checkpoint_resume import (
    NO_DROPOUT,
    Messages,
    close_run,
    open_run,
    save,
    train,
    uninterrupted_and_resumed,
)

from mindspeed_core.testing.worlds import run_world

SHARDED = ("--use-distributed-optimizer",)
GATED = ("--swiglu", "--disable-bias-linear")
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
EXPERTS = tuple(
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --disable-bias-linear --swiglu "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2".split()
)
KINDS = ("yak-lion", "yak-cadam", "yak-int8", "yak-averaging")
SAME_LAYOUT = {
    **{f"{kind}, whole": (kind, GATED) for kind in KINDS},
    **{f"{kind}, sharded, bfloat16": (kind, (*SHARDED, "--bf16")) for kind in KINDS},
    "yak-lion, whole, bfloat16": ("yak-lion", ("--bf16",)),
    "yak-averaging, sharded": ("yak-averaging", (*SHARDED, *GATED)),
    "yak-lion, written in the background": ("yak-lion", (*SHARDED, "--async-save")),
    "yak-int8, sharded, experts": ("yak-int8", (*SHARDED, *EXPERTS)),
    "yak-int8, pipeline": ("yak-int8", (*SHARDED, *PP2)),
    "yak-int8, float16": ("yak-int8", (*SHARDED, "--fp16", "--loss-scale", "64")),
}
EXACT = ("yak-lion", "yak-cadam", "yak-averaging")
OTHER_LAYOUTS = {
    **{f"{kind}, whole": (kind, GATED) for kind in EXACT},
    **{f"{kind}, sharded, bfloat16": (kind, (*SHARDED, *GATED, "--bf16")) for kind in EXACT},
}


def opened(kind, flags):
    return open_run([*NO_DROPOUT, "--optimizer", kind, *flags], registry=REGISTRY)


def tensors(folder):
    """The tensors of the optimizer in the latest checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp

    from mindspeed_core.hosts.standalone.checkpoint import publish

    path = publish.find(folder, None).path
    reader = dcp.FileSystemReader(str(path))
    held = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in held.items()
        if key.startswith("optimizer.state.") and hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def rewritten(kind, flags, source, target):
    """The tensors of a checkpoint that is loaded and saved without a step in between; and what was said."""
    messages = Messages()
    run = opened(kind, [*flags, "--load", source, "--save", target])
    save(run)
    close_run(run)
    return target, messages.end()


def compared(one, other):
    """The keys that differ; and the keys of only one side."""
    import torch

    differing = {key for key in one.keys() & other.keys() if not torch.equal(one[key], other[key])}
    return sorted(differing), sorted(one.keys() ^ other.keys())


def same_layout(folder):
    found = {}
    for name, (kind, flags) in SAME_LAYOUT.items():
        course = ["--optimizer", kind, *NO_DROPOUT, *flags]
        found[name] = uninterrupted_and_resumed(f"{folder}/{name}", course, registry=REGISTRY)[:2]
    return found


def other_layouts(folder):
    from pathlib import Path

    found = {}
    for name, (kind, flags) in OTHER_LAYOUTS.items():
        root = f"{folder}/{name}"
        run = opened(kind, [*flags, "--save", f"{root}/first"])
        train(run, 2)
        save(run)
        close_run(run)
        rewritten(kind, [*flags, *TP2], f"{root}/first", f"{root}/tp2")
        rewritten(kind, [*flags, *PP2], f"{root}/tp2", f"{root}/pp2")
        rewritten("adam", flags, f"{root}/pp2", f"{root}/adam")
        first = tensors(Path(f"{root}/first"))
        found[name] = {
            step: compared(first, tensors(Path(f"{root}/{step}"))) for step in ("tp2", "pp2", "adam")
        }
        found[name]["zeros"] = not any(first[key].any() for key in first if ".exp_avg_sq." in key)
    return found


def with_adam(folder):
    """Adam's checkpoint goes into each rule and on from there; what a rule keeps comes back."""
    from pathlib import Path

    found = {}
    for form, flags in {"whole": GATED, "sharded": (*SHARDED, *GATED)}.items():
        adam = f"{folder}/{form}"
        run = opened("adam", [*flags, "--save", adam])
        train(run, 2)
        save(run)
        close_run(run)
        for kind in EXACT[:1] + EXACT[2:]:
            target, said = rewritten(kind, flags, adam, f"{folder}/{form}-{kind}")
            differing, only = compared(tensors(Path(adam)), tensors(Path(target)))
            fresh = tensors(Path(target))
            average = {key: value for key, value in fresh.items() if ".average." in key}
            mains = {key.replace(".average.", ".param."): key for key in average}
            started = all((fresh[key] == average[own]).all() for key, own in mains.items() if key in fresh)
            back, warned = rewritten("adam", flags, target, f"{folder}/{form}-{kind}-adam")
            found[form, kind] = differing, only, started, said, warned
    return found


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("pairs"))
    return run_world(f"{__name__}:all_courses", 2, folder, timeout=400)[0]


def all_courses(folder):
    return {
        "same": same_layout(f"{folder}/same"),
        "other": other_layouts(f"{folder}/other"),
        "adam": with_adam(f"{folder}/adam"),
    }


@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_a_rule_of_ones_own_resumes_bit_for_bit(pairs, name):
    expected, resumed = pairs["same"][name]
    assert resumed == expected
    assert len({loss for loss, *_ in expected}) == len(expected)


@pytest.mark.parametrize("step", ["tp2", "pp2"])
@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_another_layout_takes_its_state_over_exactly(pairs, name, step):
    assert pairs["other"][name][step] == ([], [])


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_adam_takes_over_both_moments_and_leaves_the_rest(pairs, name):
    differing, only = pairs["other"][name]["adam"]
    assert differing == []
    assert {key.split(".")[2] for key in only} <= {"average", "sum", "last", "largest"}
    assert pairs["other"][name]["zeros"]


@pytest.mark.parametrize("kind", ["yak-lion", "yak-averaging"])
@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_adams_checkpoint_goes_into_a_rule_of_ones_own(pairs, form, kind):
    differing, only, started, _, warned = pairs["adam"][form, kind]
    # What a rule does not keep is gone, and said when Adam comes back.
    assert {key.split(".")[2] for key in differing} == {"exp_avg_sq"}
    assert {key.split(".")[2] for key in only} <= {"average", "sum", "last", "largest"}
    assert started
    assert any("kept no exp_avg_sq: after 2 updates AdamW starts it from zeros" in text for text in warned)
