"""Training on prepared conversations: what it computes, from files to losses, and what it refuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import instructions, question, write_lines, write_tokenizer

from mindspeed_core.activation import activate
from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.errors import UserError
from mindspeed_core.feature import hookimpl
from mindspeed_core.registry import Registry
from mindspeed_core.validation import check
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_models.data.preprocess import preprocess
from mindspeed_models.features import DECLARATIONS
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.scenarios import scenario_parameters
from mindspeed_testing.verify import verify
from mindspeed_testing.worlds import run_world
from mindspeed_train.interface import setup, write_index

FEATURES = [
    feature
    for feature in declared_features(DECLARATIONS)
    if feature.name in ("instruction-data", "pack-samples")
]
INSTALLED = Registry.discover()
ALWAYS = ("unpacked",)
MODEL = ("--seq-length", "96", "--vocab-size", "320", "--split", "80,20,0", "--is-instruction-dataset")
VARIABLE, PAIRS = "--variable-seq-lengths", ("--micro-batch-size", "2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_tokenizer(folder / "tokenizer")
    for name, first in (("one", 0), ("two", 50)):
        source = write_lines(folder / f"{name}.jsonl", [question(first + number) for number in range(30)])
        preprocess([str(source)], str(folder / name), instructions(folder, chat_template="chatml"))
    return folder


class Shapes:
    """Notes the shapes of micro-batches, and what is no token."""

    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def get_batch(self):
        batch = yield
        self.seen.append((tuple(batch.tokens.shape), int((~batch.padding_mask).sum())))
        return batch


@contextmanager
def training(data, *flags, probes=()) -> Iterator:
    tokenizer = ("--tokenizer-model", str(data / "tokenizer"))
    given = ("--data-path", str(data / "one")) if not any("data-path" in flag for flag in flags) else ()
    line = training_flags((*MODEL, *tokenizer, *given, *flags), 8, INSTALLED)
    session = activate(line, platform="cpu", host="standalone", extra_plugins=probes)
    try:
        with session:
            yield setup(session)
    finally:
        destroy_megatron_state()


def steps(run, count):
    found = []
    for _ in range(count):
        result = run.session.call("train_step", run=run)
        run.iteration += 1
        run.consumed_train_samples += run.args.global_batch_size
        found.append((result.losses["lm loss"], result.grad_norm, result.tokens, result.loss_tokens))
    return found


def at_once(data, *flags, count=3):
    probe = Shapes()
    with training(data, *flags, probes=[probe]) as run:
        return steps(run, count), probe.seen


def sample_by_sample(data, *flags):
    """The loss of the first step by its samples, each alone and at its own length, and the step's."""
    with training(data, *flags) as run:
        (chunk,) = run.model
        total = tokens = 0.0
        for index in range(run.args.global_batch_size):
            sample = run.datasets.train[index]
            ids, labels, mask = (sample[name][None] for name in ("tokens", "labels", "loss_mask"))
            positions = torch.arange(ids.shape[1])[None]
            with torch.no_grad():
                losses = chunk(ids, positions, None, labels=labels)
            total += float((losses.double() * mask).sum())
            tokens += float(mask.sum())
        return total / tokens, steps(run, 1)[0][0]


def resumed(data, folder, *flags):
    with training(data, *flags, "--save", folder) as run:
        first = steps(run, 1)
        run.session.call("save_checkpoint", run=run, reason="end")
    with training(data, *flags, "--load", folder) as run:
        return first + steps(run, 2)


def raised(data, *flags):
    try:
        at_once(data, *flags, count=1)
    except UserError as error:
        return str(error)
    return ""


def validated(data):
    flags = ("--eval-iters", "2", "--data-path", "3", str(data / "one"), "1", str(data / "two"))
    with training(data, *flags) as run:
        blended = run.datasets.train
        shares = np.bincount(blended.dataset_index[:32], minlength=2).tolist()
        longest = max(len(run.datasets.valid[index]["tokens"]) for index in range(4))
        batch = next(run.data.valid[0])
        return shares, longest, tuple(batch["tokens"].shape), steps(run, 1)[0][0]


def in_order(data):
    with training(data, *PAIRS, "--no-shuffle") as run:
        whole = run.datasets.train
        return whole.places(np.arange(len(whole.indices) + 2)).tolist(), whole.indices.tolist()


def everything(data, folder):
    short = (*PAIRS, VARIABLE)
    return {
        "alone": sample_by_sample(data, *PAIRS),
        "aligned": sample_by_sample(data, *PAIRS, "--keep-last-token"),
        "fixed": at_once(data, *PAIRS),
        "variable": at_once(data, *short),
        "buckets": at_once(data, *short, "--seq-length-buckets", "40,50"),
        "grouped": at_once(data, *short, "--group-by-length"),
        "packed": at_once(data, "--pack-samples", "--seq-length", "128"),
        "variable resumed": resumed(data, f"{folder}/variable", *short),
        "grouped resumed": resumed(data, f"{folder}/grouped", *short, "--group-by-length"),
        "packed resumed": resumed(data, f"{folder}/packed", "--pack-samples", "--seq-length", "128"),
        "other order": raised(data, "--load", f"{folder}/grouped", *short),
        "validated": validated(data),
        "in order": in_order(data),
        "above": raised(data, "--data-path", f"{folder}/above"),
        "beyond": raised(data, "--data-path", f"{folder}/beyond"),
        "uneven": raised(data, "--data-path", f"{folder}/uneven"),
        "absent": raised(data, "--data-path", f"{folder}/absent"),
        "cut": raised(data, "--seq-length", "16"),
    }


def write_pairs(prefix, ids, labels):
    for name, rows in (("input_ids", ids), ("labels", labels), ("attention_mask", ids)):
        stem = f"{prefix}_packed_{name}_document"
        Path(f"{stem}.bin").write_bytes(np.concatenate(rows).astype(np.int32).tobytes())
        write_index(f"{stem}.idx", np.array(list(map(len, rows)), dtype=np.int32), np.dtype(np.int32))


@pytest.fixture(scope="module")
def found(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    rows = [np.full(9, 7) for _ in range(12)]
    # The first labels of a file are looked at before training; these are negative.
    write_pairs(folder / "beyond", rows, [np.where(np.arange(9) < 8, 7, -7) for _ in rows])
    write_pairs(folder / "above", rows, [np.full(9, 5000) for _ in rows])
    write_pairs(folder / "uneven", rows, [row[:-1] for row in rows])
    (results,) = run_world(everything, 1, data, str(folder))
    return results


@pytest.mark.parametrize("name", ["alone", "aligned"])
def test_the_loss_of_a_step_is_that_of_its_samples_one_by_one(found, name):
    alone, step = found[name]
    assert step == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("name", ["variable", "buckets"])
def test_micro_batches_of_their_own_lengths_train_the_same(found, name):
    expected, _ = found["fixed"]
    for one, other in zip(found[name][0], expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_less_is_computed_the_more_lengths_are_followed(found):
    def computed(name):
        return sum(shape[0] * shape[1] for shape, _ in found[name][1])

    def tokens(name):
        return sum(count for _, count in found[name][1])

    assert tokens("fixed") == tokens("variable") == sum(step[2] for step in found["fixed"][0])
    assert {shape[1] for shape, _ in found["fixed"][1]} == {96}
    assert {shape[1] % 32 for shape, _ in found["variable"][1]} == {0}
    assert {shape[1] for shape, _ in found["buckets"][1]} <= {40, 50, 96}
    assert computed("variable") < computed("fixed")
    # More samples come in as many rows.
    assert tokens("packed") > 1.5 * tokens("fixed")


@pytest.mark.parametrize("name", ["variable", "grouped", "packed"])
def test_a_resumed_run_goes_on_with_the_next_samples(found, name):
    for one, other in zip(found[f"{name} resumed"], found[name][0], strict=True):
        assert one == pytest.approx(other, rel=1e-6)


def test_a_run_that_would_go_on_in_another_order_is_refused(found):
    assert "came in groups for steps of 4 (--group-by-length)" in found["other order"]
    assert "come one by one" in found["other order"]


def test_without_shuffling_samples_come_as_they_lie_in_every_epoch(found):
    places, indices = found["in order"]
    assert places == [*indices, *indices[:2]]


def test_blends_and_validation_are_those_of_pretraining(found):
    shares, longest, shape, loss = found["validated"]
    assert shares == [24, 8]
    assert longest < 96
    assert shape == (1, 96)
    assert loss > 0


def test_files_that_cannot_be_trained_are_refused(found):
    assert "contains the id 5000, the tokenizer has" in found["above"]
    assert "has the label -7, the tokenizer has" in found["beyond"]
    assert "have other lengths" in found["uneven"]
    assert "--data-path" in found["absent"]
    assert "absent_packed_input_ids_document" in found["absent"]
    assert "all 30 samples are longer than --seq-length 16" in found["cut"]


def problems(*flags, world_size=2):
    line = training_flags(("--is-instruction-dataset", "--data-path", "x", *flags), 1, INSTALLED)
    return "\n".join(map(str, check(line, world_size=world_size, registry=INSTALLED).problems))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--reset-attention-mask", "--reset-attention-mask is about rows of several documents"),
        ("--eod-mask-loss", "add --pack-samples"),
        (
            "--variable-seq-lengths --context-parallel-size 2 --use-flash-attn",
            "ranks split a sequence of one length",
        ),
        ("--pack-samples --variable-seq-lengths", "fills every row up to --seq-length"),
        ("--pack-samples --group-by-length", "drop --group-by-length"),
        ("--pack-samples --fix-sub-seq-length 8", "cuts rows where no sample ends"),
        ("--seq-length-buckets 16", "add it"),
        ("--seq-length-buckets 16,x --variable-seq-lengths", "is no list of lengths"),
        ("--seq-length-buckets 64 --variable-seq-lengths", "exceeds --seq-length 32"),
        (
            "--seq-length-buckets 15 --variable-seq-lengths --tensor-model-parallel-size 2 "
            "--sequence-parallel",
            "use multiples of 2",
        ),
        ("--create-attention-mask-in-dataloader", "no dense mask is made"),
        ("--num-experts 4 --moe-expert-capacity-factor 1.0", "count for the capacity"),
        ("--num-experts 4 --mtp-num-layers 1", "--mtp-num-layers"),
        ("--num-experts 4 --moe-model-type deepspeed_moe", "add --moe-no-drop"),
        ("--num-experts 4 --moe-router-load-balancing-type global_aux_loss", "use aux_loss or seq_aux_loss"),
        ("--mock-data", "brings the data"),
    ],
)
def test_flags_that_cannot_work_together_are_refused(flags, reason):
    assert reason in problems(*flags.split())


def test_packing_without_instruction_data_is_refused():
    line = training_flags(("--pack-samples",), 1, INSTALLED)
    found = "\n".join(map(str, check(line, world_size=1, registry=INSTALLED).problems))
    assert "--is-instruction-dataset" in found


def test_megatron_lms_sft_is_pointed_here():
    line = training_flags(("--sft",), 1, INSTALLED)
    found = "\n".join(map(str, check(line, world_size=1, registry=INSTALLED).problems))
    assert "mindspeed-models preprocess" in found
    assert "--is-instruction-dataset" in found


def test_the_page_of_preprocess_names_every_flag():
    from mindspeed_models.data.preprocess_command import command

    page = files("mindspeed_models").joinpath("docs/preprocess.md").read_text(encoding="utf-8")
    assert [option.opts[0] for option in command.params if option.opts[0] not in page] == []


@pytest.mark.parametrize(("feature", "scenario"), scenario_parameters(FEATURES, always=ALWAYS, first=0))
def test_proofs_hold(feature, scenario):
    verdict = verify(feature, scenario)
    assert verdict.passed, str(verdict)
