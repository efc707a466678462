"""Data, tokenizers and chosen weights of features in a Megatron-LM script."""

from __future__ import annotations

import fake_training as fake
import pytest

from mindspeed_core.feature import Flag, hookimpl
from mindspeed_core.run import Datasets
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

LOCAL = ("--platform", "cpu", *fake.GPT)
STEPS = ("--train-iters", "4")
HALF = ("--save-interval", "2", "--exit-interval", "2")


class Rows(fake.ForTests):
    """Data whose micro-batches a feature makes."""

    name = "rows"
    flags = (
        Flag("--rows", type=int, help="Number of rows."),
        Flag("--rows-length", type=int, default=16, help="Tokens of each."),
        Flag("--variable-seq-lengths", help="Tell pipeline stages every shape."),
    )
    slots = ("data-source",)

    @hookimpl
    def build_datasets(self, args):
        rows = range(args.rows)
        return Datasets(
            rows,
            rows,
            rows,
            collate=lambda rows: collated(rows, args),
            batch_sampler=lambda sampling: sampling.share(
                [index, (index + 5) % args.rows] for _ in range(99) for index in range(args.rows)
            ),
        )


def collated(rows, args):
    import torch

    places = torch.arange(args.rows_length + 1)
    whole = torch.stack([(places * (1 + row % 3) + 7 * row) % args.vocab_size for row in rows])
    return {
        "tokens": whole[:, :-1].contiguous(),
        "labels": whole[:, 1:].contiguous(),
        "loss_mask": torch.ones(len(rows), args.rows_length),
        "position_ids": places[:-1].expand(len(rows), -1).contiguous(),
    }


class Loaded:
    """Counts what is called after a load."""

    calls = 0

    @hookimpl(wrapper=True)
    def after_load_checkpoint(self):
        Loaded.calls += 1
        return (yield)


def losses(result):
    return [line["lm loss"] for line in result["log"] if "lm loss" in line]


def scripts(folder):
    fake.use_fake()
    from megatron.training import global_vars

    from mindspeed_toy_needs.features import Adapter, Letters

    fake.adapt(Rows, Letters, Adapter, extra=(Loaded(),))
    found = {}

    def script(name, *flags):
        Loaded.calls = 0
        found[name] = fake.run_script(*LOCAL, *STEPS, *flags)
        found[name]["loads"] = Loaded.calls
        if global_vars._ARGS is not None:
            found[name]["variable"] = global_vars.get_args().variable_seq_lengths
            found[name]["vocabulary"] = global_vars.get_args().padded_vocab_size
            found[name]["tokenizer"] = type(global_vars.get_tokenizer()).__name__
        fake.forget_run()

    rows = ("--rows", "20")
    script("rows", *rows)
    script("rows half", *rows, *HALF, "--save", f"{folder}/rows")
    script("rows rest", *rows, "--load", f"{folder}/rows")
    script("shorter rows", *rows, "--rows-length", "9", "--variable-seq-lengths")
    script("rows and mock", *rows, "--mock-data")
    script("letters", "--toy-letters", "69")
    script("base", *HALF, "--save", f"{folder}/base")
    adapter = ("--toy-adapter", "2", "--toy-adapter-base", f"{folder}/base")
    script("finetuned", "--finetune", "--load", f"{folder}/base")
    script("adapter", *adapter)
    script("adapter half", *adapter, *HALF, "--save", f"{folder}/adapter")
    script("adapter rest", *adapter, "--load", f"{folder}/adapter")
    script("forgotten", "--toy-adapter", "2", "--load", f"{folder}/adapter")
    from torch.distributed.checkpoint import FileSystemReader

    index = FileSystemReader(f"{folder}/adapter/iter_0000002").read_metadata().state_dict_metadata
    found["kept"] = sorted(key for key in map(str, index) if not key.startswith(("optimizer", "chained")))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("scripts"))
    return run_world(f"{__name__}:scripts", 1, folder, timeout=200)[0]


def test_a_feature_makes_the_micro_batches_of_a_script(found):
    whole = losses(found["rows"])
    assert len(set(whole)) == 4
    assert losses(found["rows half"]) == whole[:2]
    assert losses(found["rows rest"]) == whole[2:]


def test_micro_batches_may_differ_in_length_although_megatron_lm_says_no(found):
    assert len(losses(found["shorter rows"])) == 4
    assert (found["rows"]["variable"], found["shorter rows"]["variable"]) == (False, True)


def test_other_data_beside_it_is_refused(found):
    assert found["rows and mock"]["status"] != 0
    assert "the feature rows brings the data" in found["rows and mock"]["err"]


def test_a_features_tokenizer_decides_the_vocabulary_of_a_script(found):
    assert found["rows"]["vocabulary"] == 64
    assert (found["letters"]["vocabulary"], found["letters"]["tokenizer"]) == (70, "LetterTokenizer")


def test_a_script_trains_and_saves_an_adapter_on_weights_from_elsewhere(found):
    whole = losses(found["adapter"])
    # At first the adapter adds nothing to the weights that were loaded, though no flag names a checkpoint.
    assert whole[0] == losses(found["finetuned"])[0]
    assert losses(found["adapter half"]) == whole[:2]
    assert losses(found["adapter rest"]) == whole[2:]
    assert [key.rpartition(".")[2] for key in found["kept"]] == ["adapter_down", "adapter_up"]


def test_features_learn_of_every_load(found):
    assert [found[name]["loads"] for name in ("rows", "finetuned", "adapter", "adapter rest")] == [0, 1, 1, 1]


def test_weights_from_nowhere_are_an_error(found):
    assert "toy-adapter leaves them out" in found["forgotten"]["err"]
    assert "load_checkpoint(source=...)" in found["forgotten"]["err"]
