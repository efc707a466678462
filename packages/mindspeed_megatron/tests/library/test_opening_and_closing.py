"""Sessions that follow each other and take turns in one process, while their models live on."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from library_features import build, logits, parallel, registry, small
from megatron.core import parallel_state

from mindspeed_core import activate, prepare
from mindspeed_core.errors import SessionError
from mindspeed_core.resolver.plan import PlanError
from mindspeed_testing import run_world
from mindspeed_testing.leak_check import ProcessState

KERNELS = {"use_fused_rmsnorm": True, "use_fused_swiglu": True, "use_flash_attn": True}


def opened(flags, **options):
    return activate(flags, registry=registry(), platform="cpu", **options)


def two_models():
    """A model of each of two sessions, in turns; what each says when."""
    parallel()
    config = small()
    plain = prepare({}, configs=[config], platform="cpu")
    fused = prepare({**KERNELS, "toy_embedding_scale": 2.0}, configs=[config], platform="cpu")
    with fused:
        changed = build(fused, config)
        first = logits(changed)
    with plain:
        usual = build(plain, config)
        says = logits(usual)
        in_the_others_turn = logits(changed)
    outside = logits(changed)
    with fused:
        again = logits(changed)
    with plain:
        says_again = logits(usual)
    return {
        "again": torch.equal(first, again) and torch.equal(says, says_again),
        "kernels": torch.allclose(says, outside, atol=1e-5) and not torch.allclose(says, first, atol=1e-2),
        "outside": torch.equal(outside, in_the_others_turn),
        "modules": fused.report()["modules"] if fused.is_open else fused.placements,
    }


def test_two_models_with_different_features_take_turns():
    (found,) = run_world(two_models, 1)
    assert found["again"], "each model says the same in each turn of its session"
    assert found["kernels"], "fused modules work after their session; the change of an instance does not"
    assert found["outside"]
    assert dict(found["modules"]) == {"flash-attn": 2, "fused-rmsnorm": 5, "fused-swiglu": 2}


def reopened():
    """One session after another on the same groups, in a world of two; which group objects each had."""
    parallel()
    first = opened({"pair": True})
    first.build_groups()
    groups = {name: first.groups[name] for name in first.groups}
    second = first.reopen({"pair": True, "pair_backwards": True})
    second.build_groups()
    forward, backward = second.groups["pair.forward"], second.groups["pair.backward"]
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number, group=backward)
    second.close()
    with first:
        reclaimed = first.groups["pair.forward"]
    third = opened({"pair": True, "pair_backwards": True})
    third.build_groups()
    third_pair = (third.groups["pair.forward"], third.groups["pair.backward"])
    third.close()
    return {
        "reused": forward is groups["pair.forward"] and second.groups["pair.alone"] is groups["pair.alone"],
        "two": forward is not backward,
        "sum": number.item(),
        "closed": first.is_open,
        "reclaimed": reclaimed is forward,
        "all reused": {id(group) for group in third_pair} == {id(forward), id(backward)},
    }


def test_a_session_opened_again_with_other_flags_reuses_process_groups():
    for found in run_world(reopened, 2):
        assert found["reused"]
        assert found["two"], "two groups of one session are never the same"
        assert found["sum"] == 3.0
        assert not found["closed"]
        assert found["reclaimed"]
        assert found["all reused"]


def another_world():
    """torch.distributed ends and begins again under a session that is opened again."""
    parallel()
    session = prepare({"pair": True}, registry=registry(), platform="cpu")
    with session:
        session.build_groups()
        before = session.groups["pair.forward"]
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel()
    with session:
        session.build_groups()
        return before is session.groups["pair.forward"], dist.get_world_size(session.groups["pair.forward"])


def test_groups_of_a_world_that_is_gone_are_not_used():
    assert run_world(another_world, 1) == [(False, 1)]


def late_and_early():
    """Groups come when torch.distributed is there, whatever was called before."""
    session = opened({"pair": True})
    config = session.config(small())
    names, pg = list(session.groups), session.run.pg
    parallel()
    session.layer_spec(config)
    result = (names, pg is None, list(session.groups), session.run.pg is not None, session.args.world_size)
    session.close()
    return result


def test_functions_work_before_torch_distributed_and_groups_follow():
    for found in run_world(late_and_early, 2):
        assert found == ([], True, ["pair.forward", "pair.alone"], True, 2)


def different_plans():
    parallel()
    session = opened({"pair": True} if dist.get_rank() else {"pair": True, "remembers": True})
    try:
        session.build_groups()
    except SessionError as error:
        return str(error)
    finally:
        session.close()


def test_ranks_with_different_plans_are_told_before_anything_hangs():
    for message in run_world(different_plans, 2):
        assert "do not run the same plan" in message


def models_that_need_their_session():
    parallel()
    before = ProcessState.now()
    config, messages = small(), []
    session = opened({"doubled": True}, configs=[config])
    model = build(session, config)
    tokens = torch.arange(8).reshape(2, 4)
    inside = model.embedding.word_embeddings(tokens)
    for leave in (session.close, lambda: session.reopen({})):
        try:
            leave()
        except SessionError as error:
            messages.append(str(error))
    still = session.is_open
    session.close(force=True)
    outside = model.embedding.word_embeddings(tokens)
    session = opened({"doubled": True}, configs=[config])
    other = weakref.ref(build(session, config))
    gc.collect()
    session.close()
    doubled = torch.equal(inside, 2.0 * outside)
    # megatron-core's model chooses its attention by environment variables, and leaves them.
    left = [text for text in ProcessState.now().left_since(before) if "NVTE_" not in text]
    return messages, still, doubled, other() is None, left


def test_a_session_that_a_model_needs_is_not_left_by_accident():
    ((messages, still, doubled, gone, left),) = run_world(models_that_need_their_session, 1)
    assert len(messages) == 2
    assert all("doubled still live" in message and "force=True" in message for message in messages)
    assert still
    assert doubled
    assert gone, "the session keeps no model alive"
    assert left == []


def remembering():
    flags = {"remembers": True}
    session = prepare(flags, registry=registry(), platform="cpu")
    for _ in range(2):
        with session:
            assert session.train_step(lambda value: value + 1)(41) == 42
    with session:
        turns = session.state_dict()
    with opened(flags) as whole:
        whole.load_state_dict(turns)
        whole.train_step(lambda: None)()
    with whole:
        return turns, whole.state_dict(), session.run.iteration


def test_features_remember_from_turn_to_turn_and_a_run_ends_once():
    ((turns, whole, iteration),) = run_world(remembering, 1)
    assert turns == {"remembers": {"steps": 2, "ends": 0}}
    assert whole == {"remembers": {"steps": 3, "ends": 1}}
    assert iteration == 2


def refused():
    first, messages = opened({}), []
    for attempt in (
        lambda: opened({}),
        lambda: first.reopen({"pair": "perhaps"}),
        lambda: first.call("build_optimizer", args=first.args, optimizer_config=None, model=[], pg=None),
    ):
        try:
            attempt()
        except (SessionError, PlanError) as error:
            messages.append(str(error))
    still = first.is_open
    first.close()
    first.close()
    return messages, still


def test_what_cannot_work_is_said_and_leaves_the_session_open():
    (((second, flags, stage), still),) = run_world(refused, 1)
    assert "another mindspeed session is open" in second
    assert "test_opening_and_closing.py" in second, "the message locates the first session"
    assert "'perhaps'" in flags
    assert "build_optimizer" in stage
    assert still


@pytest.mark.parametrize("fails", [False, True])
def test_leaving_a_block_takes_everything_back(fails):
    assert run_world(left_block, 1, fails) == [(True, [])]


def left_block(fails):
    before = ProcessState.now()
    session = opened({"shouts": True})
    patched = dist.get_rank is not before.attributes["torch.distributed", "get_rank"]
    try:
        with session:
            if fails:
                raise KeyError("the caller's own")
    except KeyError:
        patched = patched and fails
    return patched and not session.is_open, ProcessState.now().left_since(before)
