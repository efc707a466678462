"""The dispatcher with the permutation of megatron-core 0.17 and later, by stand-ins for what that does."""

import pytest
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from mindspeed_moe import dispatchers
from mindspeed_moe.dispatchers import LaunchedAllToAllDispatcher

CHOSEN = torch.tensor([[True, True, False], [False, True, False]])


@pytest.fixture
def dispatcher(monkeypatch):
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "preprocess", lambda self, chosen: chosen.sum(0))
    made = object.__new__(LaunchedAllToAllDispatcher)
    made.routing_map, made.num_out_tokens, made.drop_and_pad = CHOSEN, 4, False
    made._maybe_update_cuda_sync_point = lambda place: None
    return made


def test_what_it_says_of_padding_is_left_out(dispatcher, monkeypatch):
    monkeypatch.setattr(dispatchers, "permute", lambda *given, **options: ("rows", "probs", "order", 0, 0))

    assert dispatcher._permute(None, None) == ("rows", "probs", "order")


@pytest.mark.parametrize(("fewer", "rows"), [(True, 3), (False, 4)])
def test_as_many_rows_are_sorted_as_the_map_has(dispatcher, fewer, rows):
    dispatcher.chooses_fewer = fewer

    assert dispatcher.preprocess(CHOSEN).tolist() == [1, 2, 0]
    assert int(dispatcher.num_out_tokens) == rows
