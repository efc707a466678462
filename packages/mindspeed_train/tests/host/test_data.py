"""The data stages of the standalone host: datasets, iterators, batches."""

from __future__ import annotations

from argparse import Namespace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from mindspeed_core.errors import ArgumentError, DataError
from mindspeed_core.run import Datasets, RunContext
from mindspeed_megatron.boundary import batch_fields
from mindspeed_train.data import stages as data
from mindspeed_train.data.datasets import rank_by_rank
from mindspeed_train.text import stages as text_stages
from mindspeed_train.text.prepare import prepare_text

SEQ = 16


def arguments(**changes):
    values = {
        "seed": 1234,
        "seq_length": SEQ,
        "micro_batch_size": 2,
        "num_workers": 0,
        "data_path": None,
        "mock_data": False,
        "split": "80,10,10",
        "data_cache_path": None,
        "tokenizer_model": None,
        "tokenizer_type": None,
        "vocab_file": None,
        "merge_file": None,
        "vocab_size": 64,
        "padded_vocab_size": 64,
        "mmap_bin_files": True,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask_in_dataloader": False,
        "mtp_num_layers": None,
        "skip_train": False,
        "full_validation": False,
        "multiple_validation_sets": False,
        "global_batch_size": 4,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "data_args_path": None,
        "per_split_data_args_path": None,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "variable_seq_lengths": False,
        "dataloader_type": "single",
        "data_sharding": True,
        "allow_other_data": False,
    }
    return Namespace(**{**values, **changes})


class FakeSession:
    """Runs ``batch_fields`` as a session would; ``added`` is what a feature adds on every stage."""

    plan = SimpleNamespace(slots={}, names=())
    platform = SimpleNamespace(dry_run=False)

    def __init__(self, added=()):
        self.added = frozenset(added)
        self.records = {}

    def state(self, record):
        return self.records.setdefault(record, record())

    def at_close(self, action):
        """Take an action that is never called: this session does not close."""

    def implementations(self, stage):
        return []

    def call(self, stage, **given):
        if stage == "build_tokenizer":
            return text_stages.build_tokenizer(**given)
        assert stage == "batch_fields"
        return batch_fields(**given) | self.added


class FakeGroup:
    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def chunk(pre=True, post=True):
    return SimpleNamespace(module=SimpleNamespace(module=SimpleNamespace(pre_process=pre, post_process=post)))


def run_with(datasets=None, args=None, *, rank=0, size=1, chunks=None, consumed=(0, 0)):
    return SimpleNamespace(
        session=FakeSession(),
        args=args or arguments(),
        datasets=datasets,
        pg=SimpleNamespace(dp=FakeGroup(rank, size), pp=FakeGroup(0, 1)),
        dist=SimpleNamespace(device=torch.device("cpu")),
        context=RunContext(),
        model=chunks or [chunk()],
        consumed_train_samples=consumed[0],
        consumed_valid_samples=consumed[1],
    )


def build(args, sizes=(20, 4, 4)):
    return data.build_datasets(FakeSession(), args, sizes)


class Words:
    """Samples by position, without a length."""

    def __getitem__(self, index):
        return torch.full((1 + index % 3,), index)


def words():
    return Datasets(
        Words(),
        collate=lambda found: {"tokens": torch.nn.utils.rnn.pad_sequence(found, batch_first=True)},
        batch_sampler=lambda sampling: sampling.share([index, index + 1] for index in range(100)),
    )


def write(prefix, documents):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(scope="module")
def mock():
    return build(arguments(mock_data=True), (40, 8, 8))


@pytest.fixture
def numbers(tmp_path):
    return write(tmp_path / "numbers", [[d + 1] * 30 for d in range(20)])


def test_made_up_samples_are_the_same_every_time(mock):
    again = build(arguments(mock_data=True), (40, 8, 8))
    for index in (0, 7, 39):
        for name, value in mock.train[index].items():
            assert torch.equal(value, again.train[index][name])


def test_made_up_samples_fit_the_vocabulary(mock):
    tokens = torch.stack([mock.train[index]["tokens"] for index in range(40)])
    assert tokens.shape == (40, SEQ)
    assert tokens.min() >= 0
    assert tokens.max() < 64
    assert len(tokens.unique()) > 10


def test_labels_are_the_next_tokens(tmp_path):
    path = write(tmp_path / "count", [list(range(1, 60))] * 10)
    sample = build(arguments(data_path=[path])).train[0]
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])


def test_text_comes_back_out_of_the_dataset(tmp_path):
    for index in range(10):
        (tmp_path / f"{index}.txt").write_text(f"document number {index} speaks. " * 8)
    made = prepare_text([tmp_path], tmp_path / "text", vocab_size=300)
    args = arguments(data_path=[made.prefix], tokenizer_model=str(made.tokenizer), padded_vocab_size=384)
    tokenizer = text_stages.build_tokenizer(args)
    assert "speaks" in tokenizer.detokenize(build(args).train[0]["tokens"])


def test_splits_do_not_share_documents(numbers):
    built = build(arguments(data_path=[numbers]), (25, 4, 4))
    seen = [
        {int(token) for index in range(len(part)) for token in part[index]["tokens"]}
        for part in (built.train, built.valid, built.test)
    ]
    assert not seen[0] & seen[1]
    assert not seen[1] & seen[2]
    assert max(seen[0]) == 16


def test_weights_decide_the_blend(tmp_path):
    one = write(tmp_path / "one", [[1] * 200] * 10)
    two = write(tmp_path / "two", [[2] * 200] * 10)
    train = build(arguments(data_path=["3", one, "1", two]), (80, 4, 4)).train
    first = [int(train[index]["tokens"][0]) for index in range(80)]
    assert first.count(1) == 60


def test_weights_repeat_datasets_and_without_them_a_short_blend_is_refused(tmp_path):
    one = write(tmp_path / "one", [[1] * 20] * 10)
    two = write(tmp_path / "two", [[2] * 20] * 10)
    assert len(build(arguments(data_path=["1", one, "1", two]), (500, 0, 0)).train) >= 500
    with pytest.raises(DataError, match="needs 500"):
        build(arguments(data_path=[one, two]), (500, 0, 0))


def test_a_split_without_samples_is_left_out(numbers):
    built = build(arguments(data_path=[numbers], split="100,0,0"), (25, 0, 0))
    assert (built.valid, built.test) == (None, None)


def test_a_share_of_zero_leaves_its_split_out(numbers):
    built = build(arguments(data_path=[numbers], split="90,10,0"), (25, 4, 4))
    assert len(built.valid) >= 4
    assert built.test is None


def test_an_empty_split_is_refused_instead_of_counting_epochs_forever(numbers):
    with pytest.raises(DataError, match=r"no text for validation.*--eval-iters"):
        build(arguments(data_path=[numbers], split="99,1,0"), (25, 4, 0))


def test_another_tokenizer_is_noticed(numbers):
    with pytest.raises(DataError, match="contains the id 20, the tokenizer has 16"):
        build(arguments(data_path=[numbers], vocab_size=16))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    made = prepare_text([tmp_path], tmp_path / "text", vocab_size=300)
    args = arguments(tokenizer_model=str(made.tokenizer), vocab_size=None)
    tokenizer = text_stages.build_tokenizer(args)
    with pytest.raises(ArgumentError, match=r"--vocab-size: .* the model has 64"):
        text_stages.check_vocabulary(FakeSession(), tokenizer, args)


def test_missing_data_is_named(tmp_path):
    with pytest.raises(DataError, match="gone"):
        build(arguments(data_path=[str(tmp_path / "gone")]))


def test_a_cache_that_cannot_be_written_names_the_flag(numbers, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--data-cache-path"):
        build(arguments(data_path=[numbers], data_cache_path=str(tmp_path / "file" / "cache")))


def tokens_of(dataset, positions):
    return torch.stack([dataset[position]["tokens"] for position in positions])


def test_ranks_together_read_the_samples_of_one_rank(mock):
    ranks = [
        data.build_data_iterators(FakeSession(), run_with(mock, rank=r, size=2)).train[0] for r in (0, 1)
    ]
    for step in range(3):
        read = torch.cat([next(iterator)["tokens"] for iterator in ranks])
        assert torch.equal(read, tokens_of(mock.train, range(step * 4, step * 4 + 4)))


def test_iterators_go_on_where_the_run_stands(mock):
    iterators = data.build_data_iterators(FakeSession(), run_with(mock, consumed=(10, 4)))
    assert torch.equal(next(iterators.train[0])["tokens"], tokens_of(mock.train, (10, 11)))
    assert torch.equal(next(iterators.valid[0])["tokens"], tokens_of(mock.valid, (4, 5)))
    assert torch.equal(next(iterators.test[0])["tokens"], tokens_of(mock.test, (0, 1)))


def test_every_model_chunk_reads_the_same_samples(mock):
    iterators = data.build_data_iterators(FakeSession(), run_with(mock, chunks=[chunk(), chunk()])).train
    first = [next(iterators[0])["tokens"] for _ in range(3)]
    second = [next(iterators[1])["tokens"] for _ in range(3)]
    assert all(map(torch.equal, first, second))


def test_validation_never_ends(mock):
    run = run_with(Datasets(mock.train, [mock.valid[i] for i in range(4)]))
    iterator = data.build_data_iterators(FakeSession(), run).valid[0]
    batches = [batch["tokens"] for batch in islice(iterator, 5)]
    assert torch.equal(batches[0], batches[2])
    assert torch.equal(batches[1], batches[3])


def test_reading_data_leaves_the_random_state_of_the_model_alone(mock):
    before = torch.get_rng_state()
    next(data.build_data_iterators(FakeSession(), run_with(mock)).train[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_all_samples_arrive_before_the_end_is_reported(mock, workers):
    run = run_with(Datasets([mock.train[i] for i in range(6)]), arguments(num_workers=workers))
    iterator = data.build_data_iterators(FakeSession(), run).train[0]
    assert len(list(islice(iterator, 3))) == 3
    with pytest.raises(DataError, match=r"used up.*--train-iters"):
        next(iterator)


def test_splits_without_dataset_have_no_iterator(mock):
    iterators = data.build_data_iterators(FakeSession(), run_with(Datasets(mock.train)))
    assert (iterators.valid, iterators.test) == (None, None)


@pytest.mark.parametrize(
    ("pre", "post", "mask", "mtp", "expected"),
    [
        (True, False, False, None, {"tokens", "position_ids"}),
        (False, True, False, None, {"labels", "loss_mask"}),
        (False, False, False, None, set()),
        (False, False, True, None, {"attention_mask"}),
        (True, True, False, None, {"tokens", "position_ids", "labels", "loss_mask"}),
        (False, True, False, 1, {"tokens", "position_ids", "labels", "loss_mask"}),
        (False, False, False, 1, set()),
    ],
)
def test_each_stage_names_what_it_needs(pre, post, mask, mtp, expected):
    args = arguments(create_attention_mask_in_dataloader=mask, mtp_num_layers=mtp)
    assert batch_fields(args, pre, post) == expected


def batch(run, session=None, vp_stage=None, iterator=None):
    session = session or FakeSession()
    iterator = iterator or data.build_data_iterators(session, run).train[0]
    return data.get_batch(session, run, iterator, vp_stage)


def test_a_batch_has_the_fields_of_its_stage_and_no_others(mock):
    first = batch(run_with(mock, chunks=[chunk(True, False)]))
    last = batch(run_with(mock, chunks=[chunk(False, True)]))
    assert (first.labels, first.loss_mask, last.tokens, last.position_ids) == (None,) * 4
    assert first.attention_mask is None
    assert first.tokens.shape == first.position_ids.shape == last.labels.shape == (2, SEQ)
    assert (first.tokens.dtype, last.loss_mask.dtype) == (torch.int64, torch.float32)


def test_the_chunk_of_the_virtual_stage_decides(mock):
    run = run_with(mock, chunks=[chunk(True, False), chunk(False, True)])
    assert batch(run, vp_stage=1).labels is not None
    assert batch(run, vp_stage=1).tokens is None


def test_a_middle_stage_does_not_touch_the_iterator():
    found = batch(run_with(chunks=[chunk(False, False)]), iterator=iter(()))
    assert found.tokens is None
    assert dict(found.extra) == {}


def test_a_feature_can_ask_for_a_field_on_a_middle_stage(mock):
    found = batch(run_with(mock, chunks=[chunk(False, False)]), FakeSession({"position_ids"}))
    assert found.position_ids.shape == (2, SEQ)
    assert found.tokens is None


def test_fields_beyond_the_batch_go_to_extra(tmp_path):
    one = write(tmp_path / "one", [[1] * 200] * 10)
    two = write(tmp_path / "two", [[2] * 200] * 10)
    built = build(arguments(data_path=["1", one, "1", two]), (20, 0, 0))
    found = batch(run_with(built), FakeSession({"dataset_id"}))
    assert torch.equal(found.extra["dataset_id"], found.tokens[:, 0] - 1)


def test_a_field_that_the_dataset_does_not_have_is_named(mock):
    with pytest.raises(DataError, match="gives no attention_mask"):
        batch(run_with(mock), FakeSession({"attention_mask"}))


def test_masks_end_at_documents_on_request(tmp_path):
    documents = [[5, 6, 7, 63]] * 200
    args = arguments(
        data_path=[write(tmp_path / "short", documents)],
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        create_attention_mask_in_dataloader=True,
    )
    found = batch(run_with(build(args), args))
    assert found.attention_mask.shape == (2, 1, SEQ, SEQ)
    assert found.attention_mask.dtype == torch.bool
    ends = (found.tokens[0] == 63).nonzero().flatten()
    after = int(ends[0]) + 1
    assert found.position_ids[0, after] == 0
    assert bool(found.attention_mask[0, 0, after, after - 1])
    assert not bool(found.attention_mask[0, 0, after, after])
    assert found.loss_mask[0, ends].sum() == 0
    assert found.loss_mask[0].sum() == SEQ - len(ends)


class FakeWorld:
    """The view of one rank: what it says and what the others say in each turn."""

    def __init__(self, rank, others):
        self.rank, self.others, self.said = rank, list(others), []

    def is_available(self):
        return True

    is_initialized = is_available

    def get_world_size(self, group=None):
        return 2

    def get_rank(self):
        return self.rank

    def all_gather_object(self, target, mine, group=None):
        self.said.append(mine)
        target[self.rank] = mine
        target[1 - self.rank] = self.others.pop(0)


def join(monkeypatch, world):
    for name in ("is_available", "is_initialized", "get_world_size", "get_rank", "all_gather_object"):
        monkeypatch.setattr(torch.distributed, name, getattr(world, name))


def test_a_failure_of_rank_0_is_raised_on_the_others_before_they_build(monkeypatch):
    world = FakeWorld(1, ["disk full"])
    join(monkeypatch, world)
    built = []
    with pytest.raises(DataError, match=r"disk full \(rank 0\)"):
        rank_by_rank(lambda: built.append(1), arguments())
    assert not built


def test_a_failure_of_rank_0_is_told_to_the_others(monkeypatch, tmp_path):
    world = FakeWorld(0, [""])
    join(monkeypatch, world)
    with pytest.raises(DataError, match="gone"):
        build(arguments(data_path=[str(tmp_path / "gone")]))
    assert "gone" in world.said[0]


def test_a_failure_of_another_rank_is_raised_on_rank_0(monkeypatch):
    join(monkeypatch, FakeWorld(0, ["", "no such file"]))
    with pytest.raises(DataError, match=r"no such file \(rank 1\)"):
        rank_by_rank(lambda: Datasets([1]), arguments())


def test_a_cut_off_index_is_built_again(numbers, tmp_path):
    args = arguments(data_path=[numbers], data_cache_path=str(tmp_path / "cache"))
    before = build(args).train[3]
    for file in (tmp_path / "cache").glob("*sample_index.npy"):
        file.write_bytes(file.read_bytes()[:40])
    assert torch.equal(build(args).train[3]["tokens"], before["tokens"])


@pytest.mark.parametrize("array", ["document_index", "sample_index", "shuffle_index"])
def test_an_index_of_another_dataset_is_built_again_or_refused_by_name(numbers, tmp_path, array):
    other = write(tmp_path / "other", [[1, 2, 3, 4, 5, 6, 7]] * 61)
    cache = tmp_path / "cache"
    build(arguments(data_path=[str(other)], data_cache_path=str(cache)))
    (foreign,) = cache.glob(f"*train-{array}.npy")
    content = foreign.read_bytes()
    args = arguments(data_path=[numbers], data_cache_path=str(cache))
    before = build(args).train[3]["tokens"]
    (own,) = {*cache.glob(f"*train-{array}.npy")} - {foreign}
    built = own.read_bytes()
    own.write_bytes(content)
    assert torch.equal(build(args).train[3]["tokens"], before)
    assert own.read_bytes() == built
    # An older version, or megatron-core alone, keeps no digests by which the change shows.
    own.with_name(own.name.replace(f"{array}.npy", "digests.json")).unlink()
    own.write_bytes(content)
    with pytest.raises(DataError, match=f"{own.name}: is the index of another dataset.*delete it"):
        build(args)


def test_cache_files_are_named_as_by_megatron_core(numbers, tmp_path):
    from megatron.core.datasets import gpt_dataset

    args = arguments(data_path=[numbers], data_cache_path=str(tmp_path / "cache"))
    train = build(args).train
    theirs = gpt_dataset.GPTDataset(
        train.dataset, train.dataset_path, train.indices, train.num_samples, train.index_split, train.config
    )
    assert theirs.unique_description_hash == train.unique_description_hash
    assert type(theirs).__name__ == type(train).__name__


@pytest.fixture
def three(tmp_path):
    return [write(tmp_path / f"set{token}", [[token] * 50] * 6) for token in (1, 2, 3)]


def test_each_split_reads_its_own_files(three):
    built = build(
        arguments(
            train_data_path=three[:1],
            valid_data_path=three[1:2],
            test_data_path=["1", three[1], "3", three[2]],
        ),
        (20, 8, 8),
    )
    tokens = [
        {int(token) for index in range(8) for token in part[index]["tokens"]}
        for part in (built.train, built.valid, built.test)
    ]
    assert tokens == [{1}, {2}, {2, 3}]


def test_splits_without_files_have_no_dataset(three):
    built = build(arguments(train_data_path=three[:1]), (20, 8, 8))
    assert (built.valid, built.test) == (None, None)


def test_a_file_of_any_split_is_checked(three, tmp_path):
    with pytest.raises(DataError, match="gone"):
        build(arguments(train_data_path=three[:1], test_data_path=[str(tmp_path / "gone")]), (20, 8, 8))


def test_whole_validation_data_is_one_pass(three):
    args = arguments(train_data_path=three[:1], valid_data_path=three[1:], full_validation=True)
    built = build(args, (20, None, 8))
    assert len(built.valid) == 2 * (6 * 50 - 1) // SEQ // 2 * 2


def test_validation_sets_stay_apart(three):
    args = arguments(train_data_path=three[:1], valid_data_path=three[1:], multiple_validation_sets=True)
    built = build(args, (20, 8, 8))
    assert built.valid is None
    assert {name: int(data[0]["tokens"][0]) for name, data in built.valid_sets.items()} == {
        "set2": 2,
        "set3": 3,
    }
    iterators = data.build_data_iterators(FakeSession(), run_with(built, args)).valid_sets
    assert {name: int(next(own[0])["tokens"][0, 0]) for name, own in iterators.items()} == {
        "set2": 2,
        "set3": 3,
    }


def test_sets_of_the_same_name_are_numbered(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = [write(tmp_path / folder / "text", [[1] * 50] * 3) for folder in "ab"]
    args = arguments(train_data_path=paths[:1], valid_data_path=paths, multiple_validation_sets=True)
    assert list(build(args).valid_sets) == ["text-0", "text-1"]


@pytest.mark.parametrize(("size", "micro"), [(1, 2), (2, 2), (2, 1)])
def test_full_validation_counts_every_sample_once_whatever_the_world(mock, size, micro):
    samples = [mock.valid[index] for index in range(7)]
    args = arguments(full_validation=True, micro_batch_size=micro, global_batch_size=4)
    counted = []
    for rank in range(size):
        run = run_with(Datasets(mock.train, samples), args, rank=rank, size=size)
        iterator = data.build_data_iterators(FakeSession(), run).valid[0]
        for _ in range(2):
            for found in islice(iterator, 8 // micro // size):
                counted += found["tokens"][found["loss_mask"].any(dim=1)].tolist()
    assert sorted(counted) == sorted(sample["tokens"].tolist() for sample in samples * 2)


@pytest.mark.parametrize("flag", ["reset_position_ids", "eod_mask_loss"])
def test_each_way_to_treat_the_end_of_a_document_does_its_own_thing_only(tmp_path, flag):
    args = arguments(data_path=[write(tmp_path / "short", [[5, 6, 7, 63]] * 200)], **{flag: True})
    found = batch(run_with(build(args), args))
    ends = found.tokens[0] == 63
    after = int(ends.nonzero()[0]) + 1
    restarts = flag == "reset_position_ids"
    assert found.position_ids[0, after] == (0 if restarts else after)
    assert torch.equal(found.loss_mask[0] == 0, ends & (flag == "eod_mask_loss"))
    assert found.attention_mask is None


def first_tokens(iterator, count=2):
    return [batch["tokens"][:, 0].tolist() for batch in islice(iterator, count)]


@pytest.mark.parametrize(
    ("rank", "size", "expected"),
    [(0, 1, [[3, 4], [4, 5]]), (0, 2, [[3, 4], [5, 6]]), (1, 2, [[4, 5], [6, 7]])],
)
def test_ranks_take_turns_behind_the_micro_batches_that_were_used(rank, size, expected):
    run = run_with(words(), rank=rank, size=size, consumed=(6, 0))
    assert first_tokens(data.build_data_iterators(FakeSession(), run).train[0]) == expected


def test_data_that_can_only_be_iterated_is_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    run = run_with(Datasets(Stream()))
    with pytest.raises(DataError, match=r"\(Stream\) can only be iterated.*give it __getitem__"):
        next(data.build_data_iterators(FakeSession(), run).train[0])


def test_data_without_a_length_needs_a_batch_sampler():
    with pytest.raises(DataError, match=r"\(Words\) has no length"):
        next(data.build_data_iterators(FakeSession(), run_with(Datasets(Words()))).train[0])


def test_a_batch_sampler_that_ends_before_the_run_is_named():
    run = run_with(words(), consumed=(198, 0))
    iterator = data.build_data_iterators(FakeSession(), run).train[0]
    next(iterator)
    with pytest.raises(DataError, match="its batch sampler ended before the run"):
        next(iterator)


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ({"pipeline_model_parallel_size": 2}, "--variable-seq-lengths"),
        ({"context_parallel_size": 2}, "--context-parallel-size 1"),
        ({"context_parallel_size": 2, "variable_seq_lengths": True}, "--context-parallel-size 1"),
    ],
)
def test_a_micro_batch_of_another_shape_is_refused_where_ranks_expect_the_usual_one(sizes, remedy):
    run = run_with(words(), arguments(**sizes), chunks=[chunk(post=False)])
    sample = {name: torch.zeros(2, 3, dtype=torch.int64) for name in ("tokens", "position_ids")}
    with pytest.raises(DataError, match=rf"\[2, 3\].*\[2, 16\]; .*{remedy}"):
        data.get_batch(FakeSession(), run, iter([sample]), None)


def test_a_micro_batch_that_is_no_dictionary_is_refused():
    with pytest.raises(DataError, match="let collate return a dictionary"):
        data.get_batch(FakeSession(), run_with(words()), iter([(1, 2)]), None)
