"""Documents, given masks and masks of plugins: found, refused, and trained with like with a dense mask."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mindspeed_core import activate
from mindspeed_core.activation import prepare
from mindspeed_core.errors import UserError
from mindspeed_core.feature import hookimpl
from mindspeed_core.resolver.plan import PlanError
from mindspeed_cp.engine.documents import ends_by_length, ends_by_position, ends_by_token, restarted
from mindspeed_cp.engine.layout import documents_zigzag
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.tasks import tasks
from mindspeed_cp.given_mask import given_mask, set_attention_mask
from mindspeed_cp.modules.rules import end_of_document, rules_of
from mindspeed_megatron.equal_blocks import without_values
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

LENGTH, LAST = 32, 127


def test_samples_of_a_dry_run_are_one_document_each():
    tokens = torch.tensor([[1, 9, 1, 1], [1, 1, 9, 1]])
    with without_values():
        assert ends_by_token(tokens, 9) == ends_by_position(tokens - 1) == [(4,), (4,)]


@pytest.mark.parametrize(
    ("row", "ends"),
    [
        ([1, 2, 3, 4, 5, 6], (6,)),
        ([1, 2, 9, 4, 5, 6], (3, 6)),
        ([1, 2, 9, 4, 5, 9], (3, 6)),
        ([9, 9, 3, 4, 5, 6], (1, 2, 6)),
        ([9, 9, 9, 9, 9, 9], (1, 2, 3, 4, 5, 6)),
    ],
)
def test_documents_are_found_by_their_last_token_and_by_positions_alike(row, ends):
    tokens = torch.tensor([row])
    assert ends_by_token(tokens, 9) == [ends]
    assert ends_by_position(restarted(6, ends, tokens)[None]) == [ends]


def test_samples_have_documents_of_their_own():
    assert ends_by_token(torch.tensor([[1, 9, 1, 1], [1, 1, 9, 1]]), 9) == [(2, 4), (3, 4)]


@pytest.mark.parametrize(
    ("every", "ends"), [(3, (3, 6, 8)), (4, (4, 8)), (8, (8,)), (9, (8,)), (1, tuple(range(1, 9)))]
)
def test_documents_of_equal_length_end_with_what_is_left(every, ends):
    assert ends_by_length(8, every) == ends


def test_positions_begin_again_in_every_document():
    assert restarted(6, (2, 3, 6), torch.zeros(1, dtype=torch.int64)).tolist() == [0, 1, 0, 0, 1, 2]


def test_documents_of_one_token_do_not_cost_a_call_each():
    rule = MaskRule(4096, ends=tuple(range(1, 4097)))
    assert len(tasks(rule, ((0, (0, 4096)),), ((0, (0, 4096)),))) == 4096 // 128


def test_a_zigzag_inside_of_documents_owns_a_part_of_each():
    layout = documents_zigzag((8, 16), 2)
    assert layout.positions(0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert layout.positions(1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


def run_of(dataset=None, **given):
    """Return what rules are made from, without a training."""
    args = SimpleNamespace(
        seq_length=8,
        micro_batch_size=1,
        reset_attention_mask=True,
        reset_position_ids=False,
        fix_sub_seq_length=-1,
        attention_mask_type="general",
        attention_mask_on_cpu=False,
        adaptive_cp_dynamic_attn_mask=False,
        adaptive_cp_manually_set_mask_list=False,
    )
    vars(args).update(given)
    session = Answers()
    datasets = SimpleNamespace(train=dataset, valid=None, test=None, valid_sets={})
    return SimpleNamespace(args=args, session=session, datasets=datasets, tokenizer=None)


class Answers:
    """A session in which a plugin gives prepared answers, or none does."""

    def __init__(self):
        self.answers, self.states = [], {}

    def state(self, record):
        return self.states.setdefault(record, record())

    def implementations(self, stage):
        return ["acme"] if self.answers else []

    def call(self, stage, **arguments):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def dataset_with(**tokenizer):
    return SimpleNamespace(config=SimpleNamespace(tokenizer=SimpleNamespace(**tokenizer)))


def batch_of(tokens=None, position_ids=None):
    return SimpleNamespace(tokens=tokens, position_ids=position_ids)


@pytest.fixture(autouse=True)
def without_a_mask():
    yield
    set_attention_mask(None)


def test_the_last_token_is_that_of_the_tokenizer_of_the_data():
    run = run_of(dataset_with(eod=9, pad=-1))
    assert end_of_document(run) == 9
    (rule,), stated = rules_of(run, batch_of(torch.tensor([[1, 9, 1, 1, 1, 1, 1, 1]])))
    assert (rule.ends, stated) == ((2, 8), False)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (run_of(), "which no dataset here names; add --reset-position-ids"),
        (run_of(dataset_with(eod=9, pad=9)), "the dataset overwrites padding; add --reset-position-ids"),
        (run_of(dataset_with(eod=9, pad=0)), "finds documents in tokens, which the batch"),
        (run_of(reset_position_ids=True), "finds documents in position_ids, which the batch"),
    ],
)
def test_documents_that_cannot_be_found_are_refused_with_the_way_out(run, message):
    has_tokens = "finds documents in" not in message
    batch = batch_of(torch.ones(1, 8, dtype=torch.int64) if has_tokens else None)
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        rules_of(run, batch)


def test_a_mask_of_the_script_is_a_rule_of_its_own_and_made_once():
    hidden = torch.rand(8, 8) < 0.5
    set_attention_mask(hidden)
    run = run_of()
    (rule,), stated = rules_of(run, batch_of())
    assert stated
    assert not rule.causal
    assert (rule.matrix == ~hidden.numpy()).all()
    assert rules_of(run, batch_of())[0][0] is rule
    hidden[0, 0] = ~hidden[0, 0]
    changed = rules_of(run, batch_of())[0][0]
    assert changed != rule


def test_a_dynamic_mask_is_read_for_every_batch():
    set_attention_mask(torch.eye(8, dtype=torch.bool))
    run = run_of(adaptive_cp_dynamic_attn_mask=True)
    first, second = (rules_of(run, batch_of())[0][0] for _ in range(2))
    assert first == second
    assert first is not second


def test_one_call_gives_the_mask_to_the_kernels_too():
    store = pytest.importorskip("mindspeed_kernels.attention.mask_store")
    mask = torch.eye(8, dtype=torch.bool)
    set_attention_mask(mask)
    assert store.STORE.given is mask
    store.set_attention_mask(~mask)
    assert (given_mask() == ~mask).all()


@pytest.mark.parametrize(
    ("mask", "given", "message"),
    [
        (
            torch.eye(8, dtype=torch.bool),
            {"attention_mask_type": "causal"},
            "a user mask needs --attention-mask-type general",
        ),
        (torch.eye(6, dtype=torch.bool), {}, r"bool \[8, 8\], got torch.bool \(6, 6\)"),
        (
            torch.zeros(65536, 1, dtype=torch.bool).expand(65536, 65536),
            {"seq_length": 65536},
            "takes 4.0 GiB; --attention-mask-on-cpu",
        ),
    ],
)
def test_masks_of_the_script_that_do_not_fit_are_refused_with_numbers(mask, given, message):
    set_attention_mask(mask)
    with pytest.raises(UserError, match=message):
        rules_of(run_of(**given), batch_of())


def test_what_is_no_mask_cannot_be_set():
    for wrong in (
        torch.zeros(4, 4),
        torch.zeros(4, 5, dtype=torch.bool),
        torch.zeros(1, 1, 4, 4, dtype=torch.bool),
    ):
        with pytest.raises(UserError, match="square bool tensor"):
            set_attention_mask(wrong)


def test_a_plugin_answers_for_every_batch_unless_its_list_of_masks_stays():
    masks = [MaskRule(8, prefix=2), MaskRule(8, prefix=4)]
    for stays, found in ((False, masks), (True, masks[:1] * 2)):
        run = run_of(adaptive_cp_manually_set_mask_list=stays)
        run.session.answers = [[mask] for mask in masks]
        assert [rules_of(run, batch_of()) for _ in range(2)] == [((mask,), True) for mask in found]


def test_a_list_of_masks_without_a_plugin_is_refused_with_what_to_implement():
    with pytest.raises(UserError, match="needs a plugin that implements cp_mask_rule"):
        rules_of(run_of(adaptive_cp_manually_set_mask_list=True), batch_of())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([MaskRule(8), MaskRule(8)], "one for each of 1 samples"),
        ([np.ones((8, 8))], "answers one MaskRule"),
        (MaskRule(9), r"rules of \[9\] positions where --seq-length is 8"),
    ],
)
def test_answers_that_do_not_fit_are_refused_with_numbers(answer, message):
    run = run_of()
    run.session.answers = [answer]
    with pytest.raises(UserError, match=message):
        rules_of(run, batch_of())


def plan(*flags):
    return prepare(training_flags(flags, 1), platform="cpu", host="standalone").plan


def test_documents_in_whole_sequences_need_no_dense_mask():
    assert "packed-documents" in plan("--reset-attention-mask").names
    assert "packed-documents" in plan("--reset-attention-mask", "--use-flash-attn").names
    dense = plan("--reset-attention-mask", "--create-attention-mask-in-dataloader")
    assert "packed-documents" not in dense.names


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fix-sub-seq-length", "5"], "--fix-sub-seq-length 5 makes documents"),
        (["--fix-sub-seq-length", "0", "--reset-attention-mask"], "got 0"),
        (["--adaptive-cp-only-reschedule"], "--adaptive-cp-only-reschedule needs adaptive_cp_algo"),
        (["--adaptive-cp-without-coarse"], "--adaptive-cp-without-coarse needs adaptive_cp_algo"),
        (["--adaptive-cp-dynamic-attn-mask"], "--adaptive-cp-dynamic-attn-mask needs adaptive_cp_algo"),
        (
            ["--adaptive-cp-manually-set-mask-list", "--context-parallel-algo", "ulysses_cp_algo"],
            "or hybrid_adaptive_cp_algo, got ulysses_cp_algo",
        ),
        (["--cp-layout", "doc_zigzag"], "splits every document, which --reset-attention-mask keeps apart"),
        (["--cp-chunks-per-rank", "4"], "got --cp-layout auto with megatron_cp_algo"),
        (
            ["--cp-chunks-per-rank", "20", "--cp-layout", "balanced"],
            "cuts --seq-length 32 into 40 chunks; use at most 16",
        ),
        (
            ["--seq-length", "33", "--pipeline-model-parallel-size", "2"],
            "16 to 17 tokens; pipelines hand on equal numbers: add --variable-seq-lengths, or",
        ),
        (
            ["--seq-length", "36", "--tensor-model-parallel-size", "4", "--sequence-parallel"],
            "ranks of context parallelism 18 tokens; --sequence-parallel over 4 ranks needs",
        ),
        (
            ["--context-parallel-size", "17"],
            "--seq-length (32) is too short for --context-parallel-size (17)",
        ),
    ],
)
def test_options_without_what_they_belong_to_are_refused_with_numbers(flags, message):
    with pytest.raises(PlanError) as error:
        plan("--context-parallel-size", "2", *flags)
    assert message in str(error.value)


class Given:
    """Puts tokens, losses and a dense mask of its own into every batch, and may answer with a mask rule."""

    def __init__(self, seen, ends=(), counts=None):
        self.seen, self.ends = seen, ends
        self.counts = torch.ones(LENGTH) if counts is None else counts

    @hookimpl(wrapper=True, trylast=True)
    def get_batch(self, run):
        batch = yield
        changes = {}
        if batch.tokens is not None:
            tokens = batch.tokens % (LAST - 1)
            for row, ends in zip(tokens, self.ends * 2):
                row[torch.tensor(ends) - 1] = LAST
            changes["tokens"] = tokens
        if batch.position_ids is not None and self.ends:
            places = [
                restarted(LENGTH, ends, batch.position_ids)
                for ends in (self.ends * 2)[: len(batch.position_ids)]
            ]
            changes["position_ids"] = torch.stack(places)
        if batch.loss_mask is not None:
            changes["loss_mask"] = batch.loss_mask * 0 + self.counts
        if batch.attention_mask is not None:
            changes["attention_mask"] = ~torch.from_numpy(self.seen).view(-1, 1, LENGTH, LENGTH)
        return batch.with_(**changes)


class Rules(Given):
    """The same, with the answer of a plugin."""

    def __init__(self, rule):
        everything = np.arange(LENGTH)
        super().__init__(rule.visible(everything, everything))
        self.rule = rule

    @hookimpl
    def cp_mask_rule(self):
        return (self.rule,)


class Windows(Given):
    """Documents under a window; the baseline gets both as its dense mask."""

    def __init__(self, ends):
        everything = np.arange(LENGTH)
        super().__init__(MaskRule(LENGTH, ends=ends, window=6).visible(everything, everything), (ends,))


def packed(*samples, counts=None):
    everything = np.arange(LENGTH)
    rules = [MaskRule(LENGTH, ends=ends) for ends in samples]
    return Given(np.stack([rule.visible(everything, everything) for rule in rules]), samples, counts)


def scattered():
    """A mask in which every query sees itself and about half of all others."""
    seen = np.random.default_rng(5).random((LENGTH, LENGTH)) < 0.5
    np.fill_diagonal(seen, True)
    return seen


MATRIX = scattered()
NOTHING_FIRST = (torch.arange(LENGTH) >= 8) & (torch.arange(LENGTH) < 24)
_TOKEN, _POSITION = ("--reset-attention-mask",), ("--reset-attention-mask", "--reset-position-ids")
_ALGO = "--context-parallel-algo"
_FETCHED, _ADAPTIVE, _HEADS = ((_ALGO, f"{name}_cp_algo") for name in ("kvallgather", "adaptive", "ulysses"))
_GENERAL = ("--attention-mask-type", "general")
CASES = {
    "one document": (packed((32,)), (*_TOKEN,), _TOKEN),
    "on the border of a chunk": (packed((8, 16, 32)), _TOKEN, (*_TOKEN, *_FETCHED)),
    "single tokens": (packed((5, 6, 7, 19, 32)), _TOKEN, (*_TOKEN, *_ADAPTIVE)),
    "padding behind": (
        packed((9, 20, 32), counts=(torch.arange(LENGTH) < 20)),
        _TOKEN,
        (*_POSITION, *_HEADS),
    ),
    "nothing but ends": (packed(tuple(range(1, 33))), _TOKEN, (*_TOKEN, *_FETCHED)),
    "two samples": (packed((5, 20, 32), (13, 32)), _TOKEN, (*_POSITION, *_ADAPTIVE)),
    "a rank whose tokens do not count": (packed((7, 32), counts=NOTHING_FIRST), _TOKEN, _TOKEN),
    "in every document a zigzag": (packed((8, 24, 32)), _TOKEN, (*_TOKEN, "--cp-layout", "doc_zigzag")),
    "a whole sequence": (packed((5, 6, 7, 19, 32), (13, 32)), _TOKEN, None),
    "under a window": (
        Windows((5, 20, 32)),
        (),
        (*_TOKEN, *_FETCHED, "--window-size", "6,0"),
    ),
    "a prefix": (Rules(MaskRule(LENGTH, prefix=11)), (), _FETCHED),
    "a prefix in a ring": (Rules(MaskRule(LENGTH, prefix=11)), (), ()),
    "a matrix of a plugin": (
        Rules(MaskRule(LENGTH, causal=False, matrix=MATRIX)),
        (),
        (*_ADAPTIVE, "--adaptive-cp-manually-set-mask-list"),
    ),
    "a matrix of the script": (Given(MATRIX), (), (*_ADAPTIVE, *_GENERAL)),
    "a matrix in a ring": (Given(MATRIX), (), _GENERAL),
}


def two_steps(name, split):
    """Losses and gradient norms of two steps, with the dense mask of the data or with the sequence split."""
    plugin, documents, flags = CASES[name]
    pairs = ("--micro-batch-size", "2" if name in ("two samples", "a whole sequence") else "1")
    model = ("--num-layers", "2", "--position-embedding-type", "rope", *pairs)
    if not split:
        more = (*documents, "--create-attention-mask-in-dataloader")
    elif flags is None:
        more = documents
    else:
        more = (*flags, "--context-parallel-size", "2")
        set_attention_mask(
            None if "script" not in name and "matrix in" not in name else ~torch.from_numpy(MATRIX)
        )
    found = []
    with activate(
        training_flags((*model, *more), 2), host="standalone", platform="cpu", extra_plugins=[plugin]
    ) as session:
        run = loop.setup(session)
        for _ in range(2):
            result = session.call("train_step", run=run)
            found += [result.losses["lm loss"], result.grad_norm]
        loop.teardown(session)
    set_attention_mask(None)
    return found


def all_cases(split, names):
    return {name: two_steps(name, split) for name in names}


QUICK = (
    "single tokens",
    "padding behind",
    "two samples",
    "a rank whose tokens do not count",
    "a whole sequence",
    "under a window",
    "a prefix in a ring",
    "a matrix of the script",
)
"""Cases of an ordinary run: each kind of document, of mask and of algorithm."""
WHOLE = "a whole sequence"
"""The case that is not split."""


def check_against_dense(names):
    (dense,) = run_world(all_cases, 1, False, names)
    split, other = run_world(all_cases, 2, True, [name for name in names if name != WHOLE])
    whole = run_world(all_cases, 1, True, [WHOLE])[0] if WHOLE in names else {}
    for name, found in {**split, **whole}.items():
        assert found == pytest.approx(dense[name], rel=2e-5), name
    assert split == other
    assert {*split, *whole} == {*names}


def test_a_training_is_that_with_a_dense_mask_whatever_the_documents_and_masks():
    check_against_dense(list(QUICK))


@pytest.mark.thorough
def test_further_trainings_are_those_with_a_dense_mask():
    check_against_dense([name for name in CASES if name not in QUICK])
